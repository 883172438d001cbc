"""One run: two networks, their optimizers, and Fréchet distances as epochs go by."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes import datasets, optimizers
from recipes.gan import features
from recipes.gan.config import Config, Settings
from recipes.gan.models import NOISE, build
from recipes.recipe import Line
from recipes.training import Pass, drive, finite, precision, reseed
from recipes.vision import data as images

__all__ = ["Training", "lacks", "ready", "run"]

CLIP = 0.01  # bound of WGAN's critic
PENALTY = 10.0  # of WGAN-GP
GRID = 8  # pictures of a side of the samples
DRAWN = 500  # pictures at a time


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    checkpoints: str | None = None,
    samples: str | None = None,
    inception: str | None = None,
) -> Iterator[Line]:
    """Yield losses after every epoch, and the distance every few; one that diverges ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: where.
        data: the data folder.
        checkpoints: folder to save in and to resume from; None for neither.
        samples: folder for pictures of what the generator makes; None for none.
        inception: file of Inception's weights; its features take the place of the settings'.
    """
    training = Training(settings, torch.device(device), data, samples, inception)
    file = None if checkpoints is None else Path(checkpoints) / f"{settings.name}.pt"
    return drive(training, settings, file, config.save_every)


class Training:
    """A generator and a critic in training.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
        samples: folder for pictures; None for none.
        inception: file of Inception's weights; None for the settings' features.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        data: str | None,
        samples: str | None = None,
        inception: str | None = None,
    ) -> None:
        self.settings, self.device, self.epochs, self.done = settings, device, settings.epochs, 0
        self.elapsed, self.samples = 0.0, samples
        self.features = settings.features if inception is None else "inception"
        self.metric = features.measure(self.features, str(device), inception)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.real, self.fallback = real_images(settings, data, device)
        self.rounds = len(self.real) // settings.batch
        self.penalised = settings.kind == "wgan_gp"
        generator, critic = build(
            *(settings.pixels, settings.width, not self.penalised, 2 * settings.seed + 1)
        )
        self.generator, self.critic = generator.to(device), critic.to(device)
        choice, rounds = settings.choice, self.rounds
        self.critic_optimizer = optimizers.build(choice, self.critic, rounds)
        self.generator_optimizer = optimizers.build(
            choice, self.generator, rounds // settings.critic_rounds
        )
        self._passes: dict[str, Pass] = {}
        self._sums = torch.zeros(2, device=device)  # of the two losses in an epoch

    # Losses

    def make(self, noise: Tensor) -> Tensor:
        with precision(self.settings.precision, self.device):
            return self.generator(noise).float()

    def judge(self, pictures: Tensor) -> Tensor:
        with precision(self.settings.precision, self.device):
            return self.critic(pictures).float()

    def critic_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        """How much higher fakes are judged than real images, and WGAN-GP's penalty."""
        real = real.float() / 127.5 - 1
        with torch.no_grad():
            fake = self.make(noise)
        loss = self.judge(fake).mean() - self.judge(real).mean()
        self._sums[0] += loss.detach() * len(real)
        if not self.penalised:
            return loss
        part = torch.rand(len(real), 1, 1, 1, device=self.device)
        between = (part * real + (1 - part) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        return loss + PENALTY * ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()

    def generator_loss(self, noise: Tensor) -> Tensor:
        """How low fakes are judged."""
        loss = -self.judge(self.make(noise)).mean()
        self._sums[1] += loss.detach() * len(noise)
        return loss

    # Training

    def epoch(self) -> Line:
        """Train for an epoch, measure the distance when it is time, and return what to log."""
        settings = self.settings
        began = time.perf_counter()
        reseed(settings.seed, self.done)
        seed = settings.seed * 100_003 + self.done
        chance = torch.Generator(self.device).manual_seed(seed)
        order = torch.randperm(len(self.real), generator=chance, device=self.device)
        self.generator.train()
        self.critic.train()
        for number in range(self.rounds):
            real = self.real[order[number * settings.batch : (number + 1) * settings.batch]]
            noise = torch.randn(settings.batch, NOISE, 1, 1, generator=chance, device=self.device)
            self.round(number, real, noise)
        self.done += 1
        judged, made = (self._sums / (self.rounds * settings.batch)).tolist()
        self._sums.zero_()
        self.elapsed += time.perf_counter() - began
        last = self.done == settings.epochs
        diverged = finite(judged) is None or finite(made) is None
        fid = None
        if not diverged and (last or self.done % settings.fid_every == 0):
            fid = self.distance(settings.last_images if last else settings.fid_images)
        return {
            "epoch": self.done,
            "critic_loss": finite(judged),
            "generator_loss": finite(made),
            f"fid_{self.features}": fid if fid is None else finite(fid),
            "elapsed": round(self.elapsed, 3),
            "state_bytes": sum(
                map(optimizers.state_bytes, (self.critic_optimizer, self.generator_optimizer))
            ),
            "fallback": self.fallback,
            "diverged": diverged,
        }

    def round(self, number: int, real: Tensor, noise: Tensor) -> None:
        """Steps of the critic, and of the generator when it is its turn."""
        share = len(real) // self.settings.choice.batches
        for some, numbers in zip(real.split(share), noise.split(share), strict=True):
            self.backward("critic", some, numbers)
            self.critic_optimizer.step()
        if not self.penalised:
            with torch.no_grad():
                weights = list(self.critic.parameters())
                torch._foreach_clamp_max_(weights, CLIP)
                torch._foreach_clamp_min_(weights, -CLIP)
        if number % self.settings.critic_rounds == 0:
            for numbers in noise.split(share):
                self.backward("generator", numbers)
                self.generator_optimizer.step()

    def backward(self, name: str, *inputs: Tensor) -> None:
        """Set the gradients of one of the networks."""
        if name not in self._passes:
            loss = self.critic_loss if name == "critic" else self.generator_loss
            params = (self.critic if name == "critic" else self.generator).parameters()
            changes = [*self.generator.buffers(), *self.critic.buffers(), self._sums]
            first = next(iter(self._passes.values()), None)
            self._passes[name] = Pass(loss, params, inputs, changes, like=first)
        self._passes[name](*inputs)

    # Pictures

    @torch.no_grad()
    def pictures(self, count: int, seed: int) -> Tensor:
        """Pictures of the generator as bytes; the same noise for the same seed."""
        self.generator.eval()
        chance = torch.Generator(self.device).manual_seed(seed)
        made = []
        for start in range(0, count, DRAWN):
            size = min(DRAWN, count - start), NOISE, 1, 1
            noise = torch.randn(size, generator=chance, device=self.device)
            made.append(((self.make(noise) + 1) * 127.5).round().clamp(0, 255).byte())
        return torch.cat(made)

    def distance(self, count: int) -> float:
        """The distance of new pictures from the real images; saves some of them as a picture."""
        made = self.pictures(count, self.settings.seed + 1)
        if self.samples is not None:
            save_grid(made[: GRID**2], Path(self.samples) / f"{self.settings.name}.png")
        return features.distance(self.metric, self.real, made)

    def state(self) -> dict[str, Any]:
        """All that it takes to go on, between epochs."""
        parts = {
            "generator": self.generator.state_dict(),
            "critic": self.critic.state_dict(),
            "generator_optimizer": self.generator_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
        }
        return {"done": self.done, "elapsed": self.elapsed, **parts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        for name in ("generator", "critic", "generator_optimizer", "critic_optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.done, self.elapsed = state["done"], state["elapsed"]


def real_images(
    settings: Settings, folder: str | None, device: torch.device
) -> tuple[Tensor, bool]:
    """All images, those for training and testing, as bytes, and whether they are digits."""
    name = "cifar10"
    if settings.fallback and datasets.missing(name, folder):
        name = "digits"
    found = images.load(name, folder, str(device))
    real = torch.cat([found.train, found.test])
    if settings.limit:
        real = real[:: max(1, len(real) // settings.limit)][: settings.limit]
    if settings.pixels != real.shape[-1]:
        size = settings.pixels, settings.pixels
        real = torch.cat(
            [
                F.interpolate(some.float(), size=size, mode="bilinear").round().byte()
                for some in real.split(DRAWN)
            ]
        )
    return real, name == "digits"


def save_grid(pictures: Tensor, path: Path) -> None:
    """Save pictures side by side as a PNG file."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pictures.permute(0, 2, 3, 1).unflatten(0, (GRID, -1))
    whole = torch.cat([torch.cat(list(row), 1) for row in rows])
    Image.fromarray(whole.cpu().numpy()).save(path)


def ready(
    settings: Sequence[Settings],
    *,
    data: str | None = None,
    inception: str | None = None,
    **options: Any,
) -> None:
    """Raise FileNotFoundError if images or weights are missing, CorruptFileError if damaged."""
    if any(not each.fallback for each in settings):
        datasets.verify("cifar10", data)
    if inception is not None and not Path(inception).is_file():
        raise FileNotFoundError(f"--inception must be a file of weights, got {inception}")


def lacks(settings: Settings) -> str | None:
    """Why this machine cannot do a run, or None."""
    return optimizers.lacks(settings.choice.name) or features.lacks(settings.features)
