"""The tasks: nine to choose settings on, nine to judge them, each kind with a relative opposite.

| choose | judge |
|---|---|
| regression: targets in raw units | recommender: squared error of raw ratings |
| classifier: an MLP | imbalanced: 3 % positives, a raw feature |
| cnn: convolutions with BatchNorm | denoiser: convolutions without |
| transformer: characters | lstm: characters of other chapters |
| autoencoder: mean squared error | vae: loss summed over batch and pixels |
| sparse: logistic regression, rare features | graph: few labels, one batch |
| words: embeddings by negative sampling | contrastive: embeddings by InfoNCE |
| gan: two players | lora: low-rank changes of frozen weights |
| cartpole: PPO | poisson: a differential equation |

Each trains for seconds on one core. A learning rate that suits all of them does not exist.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.defaults import cartpole as game
from benchmarks.defaults.data import SPLITS, chapters, digits, generator, place
from benchmarks.defaults.problem import TASKS, Batch, Problem, Update, evaluate, fit, task
from benchmarks.tasks import CharTransformer

__all__ = ["TASKS"]


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def cut(tensors: Sequence[Tensor], *counts: int) -> dict[str, Batch]:
    """Split tensors of one length: `counts` samples to train and to validate, the rest to test."""
    pieces = [t.tensor_split([counts[0], counts[0] + counts[1]]) for t in tensors]
    return dict(zip(SPLITS, zip(*pieces, strict=True), strict=True))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])


def entropy(labels: Tensor) -> float:
    """Return the mean log loss of predicting the share of each label, whatever the input."""
    shares = labels.long().bincount() / len(labels)
    return float(-torch.xlogy(shares, shares).sum())


# Tables


@cache
def _friedman() -> dict[str, Batch]:
    random = generator()
    x = torch.rand(5000, 10, generator=random)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = 10 * (y + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(5000, generator=random))
    return cut((x, y[:, None]), 3000, 500)


@task("choose", "root mean squared error", steps=1500)
def regression(seed: int) -> Problem:
    """MLP 10-64-64-1 with squared error on targets around 140, neither centred nor scaled."""
    splits = _friedman()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return fit(
        *(seed, mlp(10, 64, 64, 1), splits, loss),
        measure=lambda model, batch: loss(model, batch).sqrt(),
        trivial=float(splits["test"][1].std()),
    )


@cache
def _ratings() -> dict[str, Batch]:
    random = generator()
    users, items = 500, 300
    tastes, kinds = (torch.randn(n, 4, generator=random) for n in (users, items))
    user_bias, item_bias = (0.4 * torch.randn(n, generator=random) for n in (users, items))
    pairs = torch.randperm(users * items, generator=random)[:26_000]
    user, item = pairs // items, pairs % items
    rating = 3.6 + user_bias[user] + item_bias[item] + 0.35 * (tastes[user] * kinds[item]).sum(1)
    rating = (rating + 0.5 * torch.randn(len(pairs), generator=random)).round().clamp(1, 5)
    return cut((torch.stack((user, item), 1), rating), 20_000, 2_000)


class Recommender(nn.Module):
    """Inner products of user and item vectors, and a bias of each."""

    def __init__(self, users: int, items: int, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.users, self.items, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.users(user) * self.items(item)).sum(1) + bias.squeeze(1)


@task("judge", "root mean squared error", steps=4000)
def recommender(seed: int) -> Problem:
    """Matrix factorisation of ratings from 1 to 5 with squared error, and no mean taken away."""
    splits = _ratings()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return fit(
        *(seed, Recommender(500, 300), splits, loss),
        measure=lambda model, batch: loss(model, batch).sqrt(),
        trivial=float(splits["test"][1].std()),
        batch_size=256,
    )


@cache
def _payments() -> dict[str, Batch]:
    random = generator()
    x = torch.randn(24_000, 16, generator=random)
    amount = torch.exp(torch.randn(len(x), generator=random))
    odd = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.7 * x[:, 3] + torch.log(amount)
    y = (odd + 0.3 * torch.randn(len(x), generator=random) > 3.8).float()
    x[:, 15] = 100 * amount
    return cut((x, y), 10_000, 4_000)


@task("judge", "log loss", steps=1200)
def imbalanced(seed: int) -> Problem:
    """MLP 16-64-64-1 on classes of 97 and 3 %; one feature is an amount of the order of 100."""
    splits = _payments()
    trivial = entropy(splits["test"][1])
    return fit(seed, mlp(16, 64, 64, 1), splits, log_loss, trivial=trivial, batch_size=128)


@cache
def _clicks() -> dict[str, Batch]:
    random = generator()
    features = 1000
    frequency = torch.arange(1, features + 1) ** -0.9
    frequency = (20 * frequency / frequency.sum()).clamp(max=0.9)
    x = torch.rand(12_000, features, generator=random) < frequency
    weight = torch.randn(features, generator=random)
    score = (x.float() - frequency) @ weight - 1
    return cut((x, (score.sigmoid() > torch.rand(12_000, generator=random)).float()), 8000, 1500)


@task("choose", "log loss", steps=1500)
def sparse(seed: int) -> Problem:
    """Logistic regression on 1,000 features that are 0 or 1, 20 of them 1; most are rare."""
    splits = _clicks()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return log_loss(model, (batch[0].float(), batch[1]))

    return fit(seed, nn.Linear(1000, 1), splits, loss, trivial=entropy(splits["test"][1]))


# Images


def _noisy(x: Tensor, random: torch.Generator, amount: float = 0.4) -> Tensor:
    return x + amount * torch.randn(x.shape, generator=random)


@cache
def _noisy_digits() -> dict[str, Batch]:
    """Return digits for training as they are, and the others four times each with noise."""
    random, splits = generator(), dict(digits())
    for split in SPLITS[1:]:
        x, y = splits[split]
        splits[split] = (_noisy(x.repeat(4, 1), random), y.repeat(4))
    return splits


@task("choose", "cross-entropy", steps=1500)
def classifier(seed: int) -> Problem:
    """MLP 64-128-128-10 on scikit-learn's digits with noise."""
    return fit(
        *(seed, mlp(64, 128, 128, 10), _noisy_digits(), cross_entropy),
        augment=lambda batch, random: (_noisy(batch[0], random), batch[1]),
        trivial=entropy(digits()["test"][1]),
        samples=_images(),
    )


def _images() -> dict[str, Tensor]:
    return {split: x for split, (x, _) in digits().items()}


@cache
def _placed_digits() -> dict[str, Batch]:
    """Return digits on canvases, noisy, label, clean: those for training once, others twice."""
    random, splits = generator(), {}
    for split, (x, y) in digits().items():
        clean = place(x.repeat(2, 1), random)
        splits[split] = (_noisy(clean, random), y.repeat(2), clean)
    return {**splits, "train": digits()["train"]}


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


@task("choose", "cross-entropy", steps=700)
def cnn(seed: int) -> Problem:
    """Three convolutions with BatchNorm on digits somewhere on a noisy canvas of 16 x 16."""
    pool = nn.MaxPool2d(2)
    layers = [*_convolution(1, 16), pool, *_convolution(16, 32), pool, *_convolution(32, 64)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return fit(
        *(seed, model, _placed_digits(), cross_entropy),
        augment=lambda batch, random: (_noisy(place(batch[0], random), random), batch[1]),
        trivial=entropy(digits()["test"][1]),
        samples=_images(),
    )


class Denoiser(nn.Module):
    """Convolutions down to half the size and up again, past which the image goes too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.first(x))
        coarse = F.relu(self.middle(F.relu(self.down(fine))))
        return self.last(torch.cat((fine, F.relu(self.up(coarse))), 1))


@task("judge", "mean squared error", steps=700)
def denoiser(seed: int) -> Problem:
    """Five convolutions without normalisation, which take the noise off digits on a canvas."""
    splits = _placed_digits()

    def augment(batch: Batch, random: torch.Generator) -> Batch:
        clean = place(batch[0], random)
        return _noisy(clean, random), batch[1], clean

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[2])

    trivial = float(splits["test"][2].var(0).mean())
    options = {"augment": augment, "trivial": trivial, "samples": _images()}
    return fit(seed, Denoiser(), splits, loss, batch_size=32, **options)


@task("choose", "mean squared error", steps=1500)
def autoencoder(seed: int) -> Problem:
    """MLP 64-128-8-128-64 that gives digits back."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    model = nn.Sequential(mlp(64, 128, 8), mlp(8, 128, 64))
    return fit(seed, model, digits(), loss, trivial=float(digits()["test"][0].var(0).mean()))


class VariationalAutoencoder(nn.Module):
    """Six numbers per image, each with an uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 128, 12), mlp(6, 128, 64)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence lower bound, summed over images and pixels."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        pixels = self.decoder(mean + (log_variance / 2).exp() * noise)
        divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum()
        return F.binary_cross_entropy_with_logits(pixels, x, reduction="sum") + divergence


@task("judge", "nats per image", steps=1500)
def vae(seed: int) -> Problem:
    """Variational autoencoder of digits; the loss is summed over the batch and the pixels."""
    splits = {k: (x, torch.randn(len(x), 6, generator=generator())) for k, x in _images().items()}
    mean = splits["train"][0].mean(0).clamp(1e-3, 1 - 1e-3)
    test = splits["test"][0]
    trivial = F.binary_cross_entropy(mean.expand_as(test), test, reduction="sum") / len(test)

    def augment(batch: Batch, random: torch.Generator) -> Batch:
        return batch[0], torch.randn(batch[1].shape, generator=random)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, VariationalAutoencoder)
        return model.loss(*batch)

    return fit(
        *(seed, VariationalAutoencoder(), splits, loss),
        augment=augment,
        measure=lambda model, batch: loss(model, batch) / len(batch[0]),
        trivial=float(trivial),
    )


def _views(x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return every image twice, with noise and without a quarter of its pixels."""
    seen = (torch.rand(2, *x.shape, generator=random) > 0.25).float()
    first, second = _noisy(x.expand(2, -1, -1), random, 0.2) * seen
    return first, second


@task("judge", "InfoNCE loss", steps=1200)
def contrastive(seed: int) -> Problem:
    """MLP 64-128-128-32 that tells which of 99 images another view of an image shows."""
    splits = {k: (x, *_views(x, generator())) for k, x in _images().items()}
    count = 99  # 3 times as many to validate, 5 times to test

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second = (F.normalize(model(view), dim=1) for view in batch[1:])
        similar, matching = first @ second.T / 0.1, torch.arange(len(first))
        return (F.cross_entropy(similar, matching) + F.cross_entropy(similar.T, matching)) / 2

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        parts = zip(*(view.split(count) for view in batch), strict=True)
        return torch.stack([loss(model, part) for part in parts if len(part[0]) == count]).mean()

    return fit(
        *(seed, mlp(64, 128, 128, 32), splits, loss),
        augment=lambda batch, random: (batch[0], *_views(batch[0], random)),
        measure=measure,
        trivial=math.log(count),
        batch_size=count,
    )


class LowRank(nn.Module):
    """A frozen linear layer and a change of it of low rank, zero at first."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


@cache
def _trained() -> nn.Sequential:
    """Return a classifier of noisy digits, trained with Adam whatever trains it further."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        problem = classifier(0)
    (model,) = problem.modules
    optimizer = torch.optim.Adam(model.parameters())

    def update(loss: Tensor, module: int = 0) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(500):
        problem.step(update)
    assert isinstance(model, nn.Sequential)
    return model


@task("judge", "cross-entropy", steps=1200)
def lora(seed: int) -> Problem:
    """Changes of rank 4 that teach a frozen classifier of digits to read turned negatives."""

    def turned(x: Tensor) -> Tensor:
        return 1 - x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)

    splits = {k: (turned(x), y) for k, (x, y) in _noisy_digits().items()}
    layers = [LowRank(m) if isinstance(m, nn.Linear) else m for m in _trained()]
    return fit(
        *(seed, nn.Sequential(*layers), splits, cross_entropy),
        augment=lambda batch, random: (_noisy(batch[0], random), batch[1]),
        trivial=entropy(digits()["test"][1]),
        samples=_images(),
    )


# Text


@cache
def _codes(half: int) -> tuple[dict[str, Tensor], int]:
    texts = chapters(half)
    number = {c: i for i, c in enumerate(sorted(set("".join(texts.values()))))}
    return {k: torch.tensor([number[c] for c in t]) for k, t in texts.items()}, len(number)


def _characters(seed: int, model: nn.Module, half: int, context: int = 64) -> Problem:
    parts, _ = _codes(half)
    codes, offsets = torch.cat(list(parts.values())), torch.arange(context + 1)
    lengths = [len(part) for part in parts.values()]
    places = dict(zip(parts, torch.arange(len(codes)).split(lengths), strict=True))
    starts = {k: place[: -context - 1] for k, place in places.items()}
    for split, most in (("validation", 100), ("test", 250)):
        starts[split] = starts[split][::context][:most]  # they do not overlap

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        windows = codes[batch[0][:, None] + offsets]
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    return fit(
        *(seed, model, {k: (start,) for k, start in starts.items()}, loss),
        measure=lambda model, batch: loss(model, batch) / math.log(2),
        trivial=entropy(parts["test"]) / math.log(2),
        batch_size=16,
        samples=places,
    )


@task("choose", "bits per character", steps=600)
def transformer(seed: int) -> Problem:
    """Two layers of width 64 on the characters of a novel, 64 at a time."""
    return _characters(seed, CharTransformer(_codes(0)[1], 64, width=64), 0)


class Recurrent(nn.Module):
    """An LSTM between an embedding and a linear layer."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


@task("judge", "bits per character", steps=600)
def lstm(seed: int) -> Problem:
    """LSTM of width 128 on the characters of other chapters, 64 at a time."""
    return _characters(seed, Recurrent(_codes(1)[1]), 1)


@cache
def _pairs() -> tuple[dict[str, Batch], Tensor, dict[str, Tensor]]:
    """Return pairs of neighbouring frequent words, their shares, and where they stand."""
    texts = {k: "".join(c if c.isalpha() else " " for c in t) for k, t in chapters(0).items()}
    words = {k: t.lower().split() for k, t in texts.items()}
    counts: dict[str, int] = {}
    for word in words["train"]:
        counts[word] = counts.get(word, 0) + 1
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:1500]
    number = {word: i for i, word in enumerate(frequent)}
    shares = torch.tensor([counts[word] for word in frequent]) ** 0.75
    pairs, places, before = {}, {}, 0
    for split, sequence in words.items():
        ids = torch.tensor([number[word] for word in sequence if word in number])
        both = [torch.stack((ids[d:], ids[:-d]), 1) for d in range(1, 4)]
        near = torch.cat([*both, *(b.flip(1) for b in both)])
        wrong = torch.multinomial(shares, 5 * len(near), True, generator=generator())
        pairs[split] = (near, wrong.view(-1, 5))
        places[split] = torch.arange(before, before + len(sequence))
        before += len(sequence)
    return pairs, shares, places


class SkipGram(nn.Module):
    """A vector of each word in the middle, and one, zero at first, of each word beside it."""

    def __init__(self, words: int, width: int = 32) -> None:
        super().__init__()
        self.middle, self.beside = nn.Embedding(words, width), nn.Embedding(words, width)
        nn.init.uniform_(self.middle.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.beside.weight)

    def forward(self, pairs: Tensor, wrong: Tensor) -> Tensor:
        middle = self.middle(pairs[:, 0])
        right = F.logsigmoid((middle * self.beside(pairs[:, 1])).sum(1))
        others = F.logsigmoid(-(self.beside(wrong) @ middle[:, :, None]).squeeze(2)).sum(1)
        return -(right + others).mean()


@task("choose", "negative sampling loss", steps=1500)
def words(seed: int) -> Problem:
    """Skip-gram with five negative samples for the 1,500 most frequent words of a novel."""
    splits, shares, places = _pairs()

    def augment(batch: Batch, random: torch.Generator) -> Batch:
        wrong = torch.multinomial(shares, batch[1].numel(), True, generator=random)
        return batch[0], wrong.view_as(batch[1])

    return fit(
        *(seed, SkipGram(1500), splits, lambda model, batch: model(*batch)),
        augment=augment,
        trivial=6 * math.log(2),
        batch_size=256,
        samples=places,
    )


# Graphs, games and equations


@cache
def _communities() -> tuple[Tensor, dict[str, Batch]]:
    """Return a normalised adjacency matrix, and per split: nodes, features of all, labels."""
    random, nodes, classes = generator(), 1200, 6
    label = torch.randint(classes, (nodes,), generator=random)
    edge_probability = torch.where(label[:, None] == label, 0.025, 0.004)
    edges = torch.rand(nodes, nodes, generator=random).triu(1)
    edges = ((edges > 0) & (edges < edge_probability)).float()
    edges = edges + edges.T + torch.eye(nodes)
    scale = edges.sum(1).rsqrt()
    centres = torch.randn(classes, 32, generator=random)
    features = 0.5 * centres[label] + 1.5 * torch.randn(nodes, 32, generator=random)
    splits = cut((torch.randperm(nodes, generator=random),), 400, 300)
    known = {k: (node, features.expand(1, -1, -1), label[node]) for k, (node,) in splits.items()}
    return scale[:, None] * edges * scale, known


class GraphNetwork(nn.Module):
    """Two linear layers, each after an average over neighbours."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.adjacency = adjacency
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 6)

    def forward(self, features: Tensor) -> Tensor:
        hidden = F.relu(self.first(self.adjacency @ features))
        return self.second(self.adjacency @ hidden)


@task("judge", "cross-entropy", steps=150)
def graph(seed: int) -> Problem:
    """Two graph convolutions, trained on 400 labelled nodes of 1,200, all in every step."""
    adjacency, splits = _communities()
    model = GraphNetwork(adjacency)
    features = splits["train"][1][0]

    def loss(split: str) -> Tensor:
        node, _, label = splits[split]
        return F.cross_entropy(model(features)[node], label)

    return Problem(
        [model],
        lambda update: update(loss("train")),
        lambda split: evaluate(model, lambda: loss(split)),
        entropy(splits["test"][2]),
        {k: node for k, (node, *_) in splits.items()},
    )


@cache
def _moons() -> dict[str, Tensor]:
    """Return points on two half circles that reach into each other, away from the origin."""
    random = generator()
    angle = math.pi * torch.rand(12_000, generator=random)
    side = torch.randint(2, (12_000,), generator=random) * 2.0 - 1
    points = torch.stack((angle.cos() - side / 2 + 2, side * (angle.sin() - 0.25) + 1), 1)
    points += 0.1 * torch.randn(points.shape, generator=random)
    return {k: points for k, (points,) in cut((points,), 8000, 2000).items()}


def sliced_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean Wasserstein distance of two sets of points, over 64 directions."""
    angle = torch.linspace(0, math.pi, 65)[:-1]
    directions = torch.stack((angle.cos(), angle.sin()))
    sorted_first, sorted_second = ((x @ directions).sort(0).values for x in (first, second))
    return (sorted_first - sorted_second).abs().mean()


@task("choose", "sliced Wasserstein distance", steps=1500, averaged=True)
def gan(seed: int) -> Problem:
    """Two MLPs against each other: points on two half moons, and a judge with an R1 penalty."""
    points, random = _moons(), generator(seed)
    player, judge = mlp(8, 64, 64, 2), mlp(2, 64, 64, 1, activation=nn.SiLU)
    fixed = torch.randn(2000, 8, generator=generator())

    def step(update: Update) -> None:
        real = points["train"][torch.randint(8000, (128,), generator=random)]
        fake = player(torch.randn(128, 8, generator=random))
        believed = judge(real.requires_grad_())
        (slope,) = torch.autograd.grad(believed.sum(), real, create_graph=True)
        mistakes = F.softplus(-believed) + F.softplus(judge(fake.detach()))
        update(mistakes.mean() + 2 * (slope**2).sum(1).mean(), 1)
        update(F.softplus(-judge(fake)).mean(), 0)

    def measure(split: str) -> float:
        return evaluate(player, lambda: sliced_distance(player(fixed), points[split]))

    trivial = float(sliced_distance(points["train"].mean(0).expand(2000, 2), points["test"]))
    return Problem([player, judge], step, measure, trivial, points)


@task("choose", "share of 500 steps missed", steps=40, averaged=True)
def cartpole(seed: int) -> Problem:
    """PPO on CartPole, 16 poles at once, 1,024 moves and 16 updates a step."""
    model = game.Actor()
    player = game.Player(model, seed)
    starts = {k: game.starts(32, generator(i)) for i, k in enumerate(SPLITS)}

    def measure(split: str) -> float:
        return evaluate(model, lambda: 1 - game.balanced(model, starts[split]) / game.MOST_STEPS)

    def at_random(split: str) -> float:
        return 1 - game.balanced(None, starts[split]) / game.MOST_STEPS

    return Problem([model], player.step, measure, at_random("test"), starts)


@task("judge", "relative error", steps=900)
def poisson(seed: int) -> Problem:
    """MLP 2-48-48-1 with tanh for a solution of Poisson's equation, from its residual alone."""
    random, model = generator(seed), mlp(2, 48, 48, 1, activation=nn.Tanh)

    def solution(x: Tensor) -> Tensor:
        return torch.sin(math.pi * x[:, :1]) * torch.sin(2 * math.pi * x[:, 1:])

    def step(update: Update) -> None:
        x = torch.rand(128, 2, generator=random).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        bend = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in (0, 1)
        ]
        residual = bend[0] + bend[1] + 5 * math.pi**2 * solution(x.detach()).squeeze(1)
        edge = torch.rand(64, 2, generator=random)
        side = torch.randint(2, (64,), generator=random)
        edge[torch.arange(64), side] = torch.randint(2, (64,), generator=random).float()
        update((residual**2).mean() + 100 * (model(edge) ** 2).mean())

    points = cut((torch.rand(3000, 2, generator=generator()),), 0, 1000)
    points = {k: x for k, (x,) in points.items()}

    def measure(split: str) -> float:
        exact = solution(points[split])
        return evaluate(model, lambda: (model(points[split]) - exact).norm() / exact.norm())

    return Problem([model], step, measure, 1.0, points)
