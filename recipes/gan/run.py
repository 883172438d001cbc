"""One run: two networks, their optimizers, and Fréchet distances by epoch."""

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
from recipes.training import (
    GraphedPass,
    Training,
    finite_or_none,
    forward_precision,
    run_training,
    seed_from,
)
from recipes.vision import data as images

__all__ = ["GanTraining", "missing_requirement", "require_data", "run"]

CLIP = 0.01  # bound of WGAN's critic
PENALTY = 10.0  # weight of WGAN-GP's gradient penalty
GRID = 8  # pictures in a row and in a column of the samples
CHUNK = 500  # pictures at a time


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    compile: bool = False,
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
        compile: whether torch.compile compiles the networks.
        checkpoints: folder to save in and to resume from; None for neither.
        samples: folder for pictures of what the generator makes; None for none.
        inception: file of Inception's weights; its features take the place of the settings'.
    """
    training = GanTraining(settings, torch.device(device), data, samples, inception, compile)
    return run_training(training, checkpoints, config.save_every)


class GanTraining(Training):
    """A generator and a critic in training.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
        samples: folder for pictures; None for none.
        inception: file of Inception's weights; None for the settings' features.
        compile: whether to compile the networks, but a penalised critic, of whose gradients
            torch.compile has no derivative.
    """

    saved = ("generator", "critic", "generator_optimizer", "critic_optimizer")

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        data: str | None,
        samples: str | None = None,
        inception: str | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(settings, device, settings.epochs)
        self.samples = samples
        self.features = settings.features if inception is None else "inception"
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.real, self.fallback = real_images(settings, data, device)
        source = self.fallback, settings.pixels, settings.limit
        self.metric = features.make_metric(self.features, str(device), inception, source)
        self.rounds = len(self.real) // settings.batch
        self.penalised = settings.kind == "wgan_gp"
        generator, critic = build(
            *(settings.pixels, settings.width, not self.penalised, 2 * settings.seed + 1)
        )
        self.generator, self.critic = generator.to(device), critic.to(device)
        if compile:
            self.generator.compile()
            if not self.penalised:
                self.critic.compile()
        choice, rounds = settings.choice, self.rounds
        self.critic_optimizer = optimizers.build(choice, self.critic, rounds)
        self.generator_optimizer = optimizers.build(
            choice, self.generator, rounds // settings.critic_rounds
        )
        self._passes: dict[str, GraphedPass] = {}
        self._sums = torch.zeros(2, device=device)  # the two losses of an epoch

    # Losses

    def generate(self, noise: Tensor) -> Tensor:
        with forward_precision(self.settings.precision, self.device):
            return self.generator(noise).float()

    def criticise(self, pictures: Tensor) -> Tensor:
        with forward_precision(self.settings.precision, self.device):
            return self.critic(pictures).float()

    def critic_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        """Return the mean score of fakes less that of real images, plus WGAN-GP's penalty."""
        real = real.float() / 127.5 - 1
        with torch.no_grad():
            fake = self.generate(noise)
        loss = self.criticise(fake).mean() - self.criticise(real).mean()
        self._sums[0] += loss.detach() * len(real)
        if not self.penalised:
            return loss
        part = torch.rand(len(real), 1, 1, 1, device=self.device)
        between = (part * real + (1 - part) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.criticise(between).sum(), between, create_graph=True)
        return loss + PENALTY * ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()

    def generator_loss(self, noise: Tensor) -> Tensor:
        """Return minus the mean score of fakes."""
        loss = -self.criticise(self.generate(noise)).mean()
        self._sums[1] += loss.detach() * len(noise)
        return loss

    # Training

    def advance(self) -> Line:
        """Train for an epoch, measure the distance if it is due, and return what to log."""
        settings = self.settings
        start = time.perf_counter()
        seed_from(settings.seed, self.done)
        generator = torch.Generator(self.device)
        generator.manual_seed(settings.seed * 100_003 + self.done)
        order = torch.randperm(len(self.real), generator=generator, device=self.device)
        self.generator.train()
        self.critic.train()
        for number in range(self.rounds):
            real = self.real[order[number * settings.batch : (number + 1) * settings.batch]]
            shape = settings.batch, NOISE, 1, 1
            noise = torch.randn(shape, generator=generator, device=self.device)
            self.round(number, real, noise)
        self.done += 1
        means = (self._sums / (self.rounds * settings.batch)).tolist()
        critic_loss, generator_loss = map(finite_or_none, means)
        self._sums.zero_()
        self.elapsed += time.perf_counter() - start
        last = self.done == settings.epochs
        diverged = critic_loss is None or generator_loss is None
        fid = None
        if not diverged and (last or self.done % settings.fid_every == 0):
            fid = self.distance(settings.last_images if last else settings.fid_images)
        return {
            "epoch": self.done,
            "critic_loss": critic_loss,
            "generator_loss": generator_loss,
            f"fid_{self.features}": finite_or_none(fid),
            "elapsed": round(self.elapsed, 3),
            "state_bytes": sum(
                map(optimizers.state_bytes, (self.critic_optimizer, self.generator_optimizer))
            ),
            "fallback": self.fallback,
            "diverged": diverged,
        }

    def round(self, number: int, real: Tensor, noise: Tensor) -> None:
        """Step with the critic, and with the generator if it is its turn."""
        share = len(real) // self.settings.choice.batches
        for part, noise_part in zip(real.split(share), noise.split(share), strict=True):
            self.backward("critic", part, noise_part)
            self.critic_optimizer.step()
        if not self.penalised:
            with torch.no_grad():
                weights = list(self.critic.parameters())
                torch._foreach_clamp_max_(weights, CLIP)
                torch._foreach_clamp_min_(weights, -CLIP)
        if number % self.settings.critic_rounds == 0:
            for noise_part in noise.split(share):
                self.backward("generator", noise_part)
                self.generator_optimizer.step()

    def backward(self, name: str, *inputs: Tensor) -> None:
        """Set the gradients of one of the networks."""
        if name not in self._passes:
            loss = self.critic_loss if name == "critic" else self.generator_loss
            params = (self.critic if name == "critic" else self.generator).parameters()
            changes = [*self.generator.buffers(), *self.critic.buffers(), self._sums]
            first = next(iter(self._passes.values()), None)
            self._passes[name] = GraphedPass(
                loss, params, inputs, changes, shares_memory_with=first
            )
        self._passes[name](*inputs)

    # Pictures

    @torch.no_grad()
    def pictures(self, count: int, seed: int) -> Tensor:
        """Return pictures of the generator as bytes, of the same noise for the same seed."""
        self.generator.eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        chunks = []
        for start in range(0, count, CHUNK):
            shape = min(CHUNK, count - start), NOISE, 1, 1
            noise = torch.randn(shape, generator=generator, device=self.device)
            chunks.append(((self.generate(noise) + 1) * 127.5).round().clamp(0, 255).byte())
        return torch.cat(chunks)

    def distance(self, count: int) -> float:
        """Return the distance of new pictures from the real images; save some of the pictures."""
        fake = self.pictures(count, self.settings.seed + 1)
        if self.samples is not None:
            save_grid(fake[: GRID**2], Path(self.samples) / f"{self.settings.name}.png")
        return features.distance(self.metric, self.real, fake)


def real_images(
    settings: Settings, folder: str | None, device: torch.device
) -> tuple[Tensor, bool]:
    """Return all images, training and test, as bytes; and True if they are digits."""
    name = "cifar10"
    if settings.fallback and datasets.is_missing(name, folder):
        name = "digits"
    loaded = images.load(name, folder, str(device))
    real = torch.cat([loaded.train, loaded.test])
    if settings.limit:
        real = real[:: max(1, len(real) // settings.limit)][: settings.limit]
    if settings.pixels != real.shape[-1]:
        size = settings.pixels, settings.pixels
        real = torch.cat(
            [
                F.interpolate(chunk.float(), size=size, mode="bilinear").round().byte()
                for chunk in real.split(CHUNK)
            ]
        )
    return real, name == "digits"


def save_grid(pictures: Tensor, path: Path) -> None:
    """Save pictures side by side as a PNG file."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pictures.permute(0, 2, 3, 1).unflatten(0, (GRID, -1))
    grid = torch.cat([torch.cat(list(row), 1) for row in rows])
    Image.fromarray(grid.cpu().numpy()).save(path)


def require_data(
    settings: Sequence[Settings],
    *,
    data: str | None = None,
    inception: str | None = None,
    **options: Any,
) -> None:
    """Raise FileNotFoundError if images or weights are missing, CorruptFileError if damaged."""
    for fallback in {run.fallback for run in settings}:
        images.require("cifar10", data, fallback)
    if inception is not None:
        features.verify_inception(Path(inception))


def missing_requirement(settings: Settings) -> str | None:
    """Return why this machine cannot do a run, or None."""
    missing = optimizers.missing_requirement(settings.choice.name)
    return missing or features.missing_requirement(settings.features)
