"""Checkpoints of many ranks: bit for bit on the same nodes, with the same sums on others."""

import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import (
    SIZE,
    backward,
    batch,
    difference,
    here,
    identical,
    network,
    settings,
    spectral,
    weights,
)
from tests.distributed.processes import run
from torchpisa import NSISA, PISA, SISA
from torchpisa.distributed import attach, export, latest, load, save, shard
from torchpisa.distributed.checkpoint import remap
from torchpisa.preconditioners import Identity, SecondMoment

# What is saved is computed once, and loaded by many tests.
pytestmark = pytest.mark.xdist_group("checkpoint")

OTHER_SIZE = [3, 1, 4, 2]  # of the nodes that a checkpoint is loaded on


class Layout(NamedTuple):
    """An arrangement of nodes over processes."""

    kind: str
    replicas: int = 1
    batches: int = 1
    shards: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.replicas}x{self.shards}x{self.batches}"

    @property
    def processes(self) -> int:
        return self.replicas * self.shards

    @property
    def nodes(self) -> int:
        return self.replicas * self.batches


class Run:
    """A model in training, as one process sees it."""

    def __init__(
        self,
        layout: Layout,
        make: Any,
        seed: int = 1,
        sizes: list[int] = SIZE,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
        **more: Any,
    ) -> None:
        self.layout = layout
        self.device, self.dtype = device, dtype
        rank = distributed.get_rank() if layout.processes > 1 else 0
        first = rank // layout.shards * layout.batches
        self.nodes = list(range(first, first + layout.batches))
        self.inner: Any = network(dtype, seed).to(device)
        self.model: Any = self.inner
        if layout.kind == "plain":
            more["process_group"] = distributed.group.WORLD
        elif layout.kind == "ddp":
            more["process_group"] = distributed.group.WORLD
            self.model = DistributedDataParallel(self.inner, bucket_cap_mb=0.0002)
        elif layout.kind == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (layout.shards,)))
        elif layout.kind == "hsdp":
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", layout[1::2], mesh_dim_names=names)
            more["process_group"] = shard(self.model, mesh, [self.model[2]])
        own = {"weights": [sizes[node] for node in self.nodes], **more}
        self.opt = make(self.model.parameters(), **{**settings(make, self.nodes), **own})
        if layout.kind == "ddp":
            attach(self.opt, self.model)

    def train(self, first: int, last: int) -> "Run":
        """Batches `first` to `last`, all rounds counted; not every batch reaches everything."""
        for k in range(first, last):
            node, step = self.nodes[k % len(self.nodes)], k // len(self.nodes)
            self.opt.zero_grad()
            if self.layout.batches == 3 and (node, step) == (1, 2):
                self.opt.skip()
                continue
            x, y = self.data(node, step % 3)
            nn.functional.mse_loss(self.model(x), y).backward()
            if self.layout.kind != "ddp":  # which has used the gradients by now
                if (node + step) % 3 == 2:
                    self.inner[0].weight.grad = None
                    self.inner[2].bias.grad = None
                elif (node + step) % 3 == 1:
                    self.inner[2].weight.grad = None
                if step == 2:
                    self.inner[4].bias.grad = None
            self.opt.step()
        return self

    def data(self, node: int, step: int) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in batch(node, step, self.dtype)]

    def loss(self) -> float:
        pairs = [self.data(node, step) for node in range(self.layout.nodes) for step in range(3)]
        with torch.no_grad():
            losses = [nn.functional.mse_loss(self.model(x), y).item() for x, y in pairs]
        return sum(losses) / len(losses)

    def report(self) -> dict[str, Any]:
        """Everything that can be compared, with sharded tensors put together."""
        opt = self.opt
        nodes = []
        for slot in range(opt.batches):
            of_node: dict[str, Tensor] = {}
            for name, param in self.inner.named_parameters():
                for key, value in opt.state[param].items():
                    if key.endswith(f".{slot}"):
                        of_node[f"{name} {key[:-2]}"] = full(value)
            for number, group in enumerate(opt.param_groups):
                for setting in ("sigma", "rho", "gamma"):
                    values = group[setting]
                    value = float(values[slot] if isinstance(values, list) else values)
                    of_node[f"{setting} of {number}"] = torch.tensor(value, dtype=torch.float64)
            nodes.append((opt.param_groups[0]["weights"][slot], of_node))
        return {
            "nodes": nodes,
            "weights": [full(param.detach()) for param in self.inner.parameters()],
            "iteration": opt.iteration,
            "synced": opt.synced,
        }


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.cpu().clone()


def everywhere(reports: list[dict[str, Any]], shards: int) -> dict[str, Any]:
    """The reports of all ranks as one: nodes in their order, the rest must be equal."""
    assert identical([report["weights"] for report in reports])
    assert len({(report["iteration"], report["synced"]) for report in reports}) == 1
    nodes = [node for report in reports[::shards] for node in report["nodes"]]
    return {**reports[0], "nodes": nodes}


# The same nodes


def resumed(
    layout: Layout, make: Any, folder: Path, **more: Any
) -> tuple[bool, bool, bool, dict[str, Any]]:
    warnings.simplefilter("error")
    going = Run(layout, make, **more).train(0, 5)
    save(folder, going.model, going.opt, {"step": 5, "rng": torch.get_rng_state()})
    before = going.report()
    going.train(5, 9)
    other = Run(layout, make, seed=7, lr=0.5, sizes=OTHER_SIZE, **more)
    extra = load(folder, other.model, other.opt)
    loaded = other.report()
    if other.opt.peers is not None:
        shares = other.opt.peers.all_shares
        assert [shares[node] for node in other.nodes] == other.opt.param_groups[0]["weights"]
    other.train(5, 9)
    after = same(other.report(), going.report())
    return same(before, loaded), after, going.opt.synced, extra


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        (one["iteration"], one["synced"]) == (other["iteration"], other["synced"])
        and identical([one["weights"], other["weights"]])
        and all(
            share == other_share and all(torch.equal(a[key], b[key]) for key in a | b)
            for (share, a), (other_share, b) in zip(one["nodes"], other["nodes"], strict=True)
        )
    )


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        (Layout("plain", replicas=2, batches=2), SISA),
        (Layout("ddp", replicas=2, batches=2), NSISA),
        (Layout("hsdp", replicas=2, shards=2, batches=2), NSISA),
        (Layout("fsdp", shards=4, batches=2), SISA),  # so many that some hold nothing
    ],
    ids=str,
)
def test_resumes_bit_for_bit(layout: Layout, make: Any, tmp_path: Path) -> None:
    for loaded, after, synced, extra in run(
        resumed, layout.processes, layout, make, tmp_path / "c"
    ):
        assert (loaded, after) == (True, True)
        assert not synced
        assert extra["step"] == 5
        assert torch.equal(extra["rng"], torch.random.manual_seed(0).get_state())


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("make", [SISA, NSISA, spectral])
def test_resumes_in_one_process(make: Any, batches: int, tmp_path: Path) -> None:
    loaded, after, _, _ = resumed(Layout("alone", batches=batches), make, tmp_path / "c")
    assert (loaded, after) == (True, True)


GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.float32, "nonfinite": "skip"}


@pytest.mark.gpu
@pytest.mark.parametrize("make", [SISA, NSISA])
@pytest.mark.parametrize("kind", ["alone", "plain", "ddp"])
def test_resumes_on_a_gpu(kind: str, make: Any, tmp_path: Path) -> None:
    layout = Layout(kind, replicas=1 if kind == "alone" else 2, batches=2)
    work = (resumed, layout.processes, layout, make, tmp_path / "c")
    results = [resumed(*work[2:], **GPU)] if kind == "alone" else run(*work, **GPU)
    for loaded, after, synced, _ in results:
        assert (loaded, after, synced) == (True, True, False)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [SISA, NSISA])
def test_other_nodes_on_a_gpu(make: Any, tmp_path: Path) -> None:
    going = Run(Layout("alone", batches=4), make, **GPU).train(0, 10)
    save(tmp_path / "c", going.model, going.opt)
    going.opt.flush()
    other = Run(Layout("alone", batches=2), make, seed=5, **GPU)
    load(tmp_path / "c", other.model, other.opt)
    assert other.opt.iteration == going.opt.iteration
    assert difference([weights(other.inner)], weights(going.inner)) < 1e-6


# Other nodes

OLD = {
    "four": (Layout("plain", replicas=4), SISA, 3),
    "two": (Layout("plain", replicas=2), NSISA, 3),
    "open": (Layout("plain", replicas=2, batches=2), SISA, 5),
    "open nsisa": (Layout("plain", replicas=2, batches=2), NSISA, 5),
    "open spectral": (Layout("plain", replicas=2, batches=2), spectral, 5),
    "hsdp": (Layout("hsdp", replicas=2, shards=2), SISA, 4),
    "open hsdp": (Layout("hsdp", replicas=2, shards=2, batches=2), NSISA, 5),
    "alone": (Layout("alone", batches=3), SISA, 8),
    "one": (Layout("alone"), SISA, 3),
}
FILES = ["open", "open hsdp"]
TRAINED = ("four", "open nsisa", "open hsdp file")
NEW = [
    Layout("alone"),
    Layout("alone", batches=2),
    Layout("plain", replicas=2),
    Layout("plain", replicas=2, batches=2),
    Layout("plain", replicas=3),
    Layout("hsdp", replicas=2, shards=2),
    Layout("fsdp", shards=4),
]
if torch.__version__ < "2.7":  # has no FSDP2 on CPUs
    OLD = {name: entry for name, entry in OLD.items() if entry[0].shards == 1}
    FILES = [name for name in FILES if name in OLD]
    NEW = [layout for layout in NEW if layout.shards == 1]


def before(name: str) -> Layout:
    """The layout that a checkpoint was saved in; a file is that of one process."""
    layout = OLD[name.removesuffix(" file")][0]
    return Layout("alone", batches=layout.nodes) if name.endswith(" file") else layout


def goes_on(name: str, layout: Layout) -> bool:
    """Return whether nodes load the state that they have saved themselves."""
    was = before(name)
    return (was.replicas, was.batches) == (layout.replicas, layout.batches)


# Every second pair, so that each of OLD meets several of NEW and the other way round, and whatever
# goes on.
NAMES = [*OLD, *(f"{name} file" for name in FILES)]
PAIRS = [
    (layout, name)
    for row, layout in enumerate(NEW)
    for column, name in enumerate(NAMES)
    if (row + column) % 2 == 0 or goes_on(name, layout)
]


def saved(names: list[str], folder: Path) -> list[dict[str, Any]]:
    warnings.simplefilter("error")
    reports = []
    for name in names:
        layout, make, batches = OLD[name]
        going = Run(layout, make).train(0, batches)
        save(folder / name, going.model, going.opt, {"name": name})
        going.opt.flush()
        reports.append(going.report())
    return reports


def loaded(layout: Layout, paths: dict[str, Path]) -> list[dict[str, Any]]:
    warnings.simplefilter("error")
    remap._CHUNK = 70  # several, of one parameter or of two
    reports = []
    for name, path in paths.items():
        other = Run(layout, OLD[name.removesuffix(" file")][1], seed=5, sizes=OTHER_SIZE)
        other.train(0, 1)  # so that there is something to forget, perhaps even an open round
        extra = load(path, other.model, other.opt)
        was_synced = other.opt.synced
        other.opt.flush()
        report = {**other.report(), "extra": extra, "was_synced": was_synced, "trained": []}
        if name in TRAINED:
            for group in other.opt.param_groups:
                group["lr"] = 0.1  # so that even this problem, nearly all noise, improves steadily
            report["losses"] = [other.loss(), other.train(0, 12 * layout.batches).loss()]
            report["trained"] = [full(param.detach()) for param in other.inner.parameters()]
        reports.append(report)
    return reports


class Checkpoints:
    """All of OLD, saved, and on demand loaded."""

    def __init__(self, folder: Path) -> None:
        self.paths = {name: folder / name for name in OLD}
        self.reports: dict[str, dict[str, Any]] = {}
        for processes in (1, 2, 4):
            names = [name for name in OLD if OLD[name][0].processes == processes]
            work = (saved, processes, names, folder)
            results = [saved(*work[2:])] if processes == 1 else run(*work)
            for name, *reports in zip(names, *results, strict=True):
                self.reports[name] = everywhere(reports, OLD[name][0].shards)
        for name in FILES:
            self.paths[f"{name} file"] = folder / f"{name}.pt"
            export(folder / name, self.paths[f"{name} file"])
            self.reports[f"{name} file"] = self.reports[name]
        self._loaded: dict[Layout, dict[str, dict[str, Any]]] = {}

    def loaded(self, layout: Layout) -> dict[str, dict[str, Any]]:
        if layout not in self._loaded:
            paths = {name: self.paths[name] for other, name in PAIRS if other == layout}
            work = (loaded, layout.processes, layout, paths)
            results = [loaded(*work[2:])] if layout.processes == 1 else run(*work)
            self._loaded[layout] = {
                name: {
                    **everywhere(reports, layout.shards),
                    "trained": [report["trained"] for report in reports],
                }
                for name, *reports in zip(paths, *results, strict=True)
            }
        return self._loaded[layout]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def means(old: list[int], new: list[int], values: list[Tensor]) -> list[Tensor]:
    """Return the means of old nodes that new ones take; both are cut into equal pieces."""
    old_of_piece = [node for node, size in enumerate(old) for _ in range(size * sum(new))]
    new_of_piece = [node for node, size in enumerate(new) for _ in range(size * sum(old))]
    found = []
    for node in range(len(new)):
        pairs = zip(old_of_piece, new_of_piece, strict=True)
        beside = [values[i] for i, j in pairs if j == node]
        found.append(torch.stack(beside).mean(0))
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-300))


@pytest.mark.parametrize(("layout", "name"), PAIRS, ids=str)
def test_on_other_nodes(checkpoints: Checkpoints, layout: Layout, name: str) -> None:
    old, new = checkpoints.reports[name], checkpoints.loaded(layout)[name]
    sizes, other_sizes = SIZE[: before(name).nodes], OTHER_SIZE[: layout.nodes]
    if goes_on(name, layout):
        other_sizes = sizes  # the saved ones are back
    # The report is from after a flush(), which had something to do only if the run goes on.
    was_open = "open" in name or name == "alone"
    assert new["was_synced"] != (was_open and goes_on(name, layout))
    assert new["iteration"] == old["iteration"]
    assert difference([new["weights"]], old["weights"]) < 1e-12
    assert new["extra"] == {"name": name.removesuffix(" file")}
    for number, (share, _) in enumerate(new["nodes"]):
        assert share == pytest.approx(other_sizes[number] / sum(other_sizes), rel=1e-15)
    for key in old["nodes"][0][1]:
        values = [of_node[key] for _, of_node in old["nodes"]]
        found = [of_node[key] for _, of_node in new["nodes"]]
        for own, expected in zip(found, means(sizes, other_sizes, values), strict=True):
            if key.endswith("step"):
                assert own == expected.double().round()
            else:
                assert apart(own, expected) < 1e-12, key
        if key.endswith("dual") or "sigma" in key:
            sums = [
                sum(share * of_node[key] for share, of_node in of_run["nodes"])
                for of_run in (new, old)
            ]
            assert apart(*sums) < 1e-12, key


@pytest.mark.parametrize(
    ("layout", "name"), [pair for pair in PAIRS if pair[1] in TRAINED], ids=str
)
def test_training_goes_on(checkpoints: Checkpoints, layout: Layout, name: str) -> None:
    new = checkpoints.loaded(layout)[name]
    assert identical(new["trained"])
    first, last = new["losses"]
    assert last < first


def drifting(path: Path) -> list[Tensor]:
    """A rank whose hardware computes differently."""
    consensus = remap.consensus

    def inexact(*args: Any) -> None:
        consensus(*args)
        for member in args[1]:
            member.param.mul_(1 + 1e-9 * distributed.get_rank())

    remap.consensus = inexact
    other = Run(Layout("plain", replicas=2), SISA)
    load(path, other.model, other.opt)
    return weights(other.inner)


def test_ranks_that_compute_differently_agree(checkpoints: Checkpoints) -> None:
    results = run(drifting, 2, checkpoints.paths["open"])
    assert identical(results)
    assert difference(results, checkpoints.reports["open"]["weights"]) < 1e-12


def troubled(path: Path) -> bool:
    """A rank that would raise at the end of the round, had it not been replaced."""
    other = Run(Layout("plain", replicas=2, batches=2), SISA)
    for param in other.inner.parameters():
        param.grad = torch.full_like(param, torch.nan)
    other.opt.step()
    load(path, other.model, other.opt)
    return bool(other.train(0, 2).opt.synced)


def test_troubles_are_forgotten(checkpoints: Checkpoints) -> None:
    assert run(troubled, 2, checkpoints.paths["four"]) == [True, True]


# One file


def test_file_is_that_of_one_process(checkpoints: Checkpoints, tmp_path: Path) -> None:
    export(checkpoints.paths["four"], tmp_path / "new" / "c.pt")
    held = torch.load(tmp_path / "new" / "c.pt", weights_only=True)
    assert held["extra"] == {"name": "four"}
    other = Run(Layout("alone", batches=4), SISA, seed=5)
    other.inner.load_state_dict(held["model"])
    other.opt.load_state_dict(held["optimizer"])
    assert same(other.report(), checkpoints.reports["four"])
    reference = Run(Layout("alone", batches=4), SISA).train(0, 12)
    for run_ in (reference, other):
        run_.train(12, 24)
    assert difference([weights(other.inner)], weights(reference.inner)) < 1e-12


@pytest.mark.parametrize("name", FILES)
def test_file_from_the_middle_of_a_round(checkpoints: Checkpoints, name: str) -> None:
    held = torch.load(checkpoints.paths[f"{name} file"], weights_only=True)
    other = Run(Layout("alone", batches=4), OLD[name][1], seed=5)
    other.inner.load_state_dict(held["model"])
    other.opt.load_state_dict(held["optimizer"])
    assert other.opt.round.used == {0, 2}
    other.opt.flush()
    found, expected = other.report(), checkpoints.reports[name]
    assert found["iteration"] == expected["iteration"]
    assert difference([found["weights"]], expected["weights"]) < 1e-12
    for (_, own), (_, theirs) in zip(found["nodes"], expected["nodes"], strict=True):
        assert all(apart(own[key], theirs[key]) < 1e-12 for key in theirs)


# Complete or not at all


def killed(folder: Path, where: str) -> Any:
    going = Run(Layout("plain", replicas=2), SISA).train(0, 2)
    save(folder, going.model, going.opt, {"number": 1})
    notes = folder / "notes.txt"
    notes.touch()
    reports = [going.report(), going.train(2, 4).report()]
    if distributed.get_rank() == 0:

        def kill(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "data":
            FileSystemWriter.write_data = kill  # type: ignore[method-assign]
        elif where == "writing":
            FileSystemWriter.finish = kill  # type: ignore[method-assign]
        elif where == "renaming":
            rename = Path.rename
            Path.rename = lambda path, to: kill() if to == folder else rename(path, to)  # type: ignore
        elif where == "moving":
            rename = Path.rename
            Path.rename = lambda path, to: kill() if to == notes else rename(path, to)  # type: ignore
        elif where == "removing":
            shutil.rmtree = kill  # type: ignore[assignment]
    try:
        save(folder, going.model, going.opt, {"number": 2})
    except Exception:  # the other one is gone
        return reports
    raise AssertionError("nobody was killed")


@pytest.mark.parametrize(
    ("where", "number"),
    [("data", 1), ("writing", 1), ("renaming", 1), ("moving", 2), ("removing", 2)],
)
def test_killed_while_saving(where: str, number: int, tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    _, reports = run(killed, 2, folder, where, killed=0)
    found = latest(tmp_path)
    assert found == folder
    other = Run(Layout("alone"), SISA, seed=5)
    assert load(found, other.model, other.opt) == {"number": number}
    assert identical([weights(other.inner), reports[number - 1]["weights"]])
    save(folder, other.model, other.opt, {"number": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    assert (folder / "notes.txt").exists()
    assert load(latest(tmp_path) or "", other.model, other.opt) == {"number": 3}


def test_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for name in ("step-8", "step-000012", "step-9", "last", "step-20-copy"):
        going = Run(Layout("alone"), SISA)
        save(tmp_path / name, going.model, going.opt)
    half = tmp_path / "step-000013"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half of it")
    (tmp_path / "step-000099").touch()
    assert latest(str(tmp_path)) == tmp_path / "step-000012"
    with pytest.raises(ValueError, match=r"complete checkpoint.*step-000013' without .metadata"):
        load(half, going.model, going.opt)


# What models and optimizers may be like


class Odd(nn.Module):
    """All kinds of parameters, among them some that the optimizer does not have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))

        self.number = drawn()
        self.waves = drawn(3, 2, dtype=torch.complex128)
        self.empty = drawn(0, 4)
        self.turned = nn.Parameter(drawn(4, 6).detach().t())
        self.short = drawn(5, dtype=torch.bfloat16)
        self.tied = self.turned
        self.frozen = drawn(2).requires_grad_(False)
        self.elsewhere = drawn(2)
        self.register_buffer("seen", torch.tensor(seed))
        self.note: Any = {"seed": seed}

    def trained(self) -> list[nn.Parameter]:
        return [self.number, self.waves, self.empty, self.turned, self.short, self.frozen]

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def take(self, opt: Any, steps: int) -> None:
        for step in range(steps):
            opt.zero_grad()
            parts = [param.abs().double().square().sum() for param in self.trained()]
            (sum(parts) * (1 + step)).backward()
            opt.step()


@pytest.mark.parametrize("batches", [2, 3])
def test_odd_parameters(batches: int, tmp_path: Path) -> None:
    model = Odd(1)
    opt = SISA(model.trained(), batches=2, weights=[1, 2], state_dtype=torch.bfloat16)
    model.take(opt, 5)
    save(tmp_path / "c", model, opt)
    other = Odd(2)
    resumed = SISA(other.trained(), batches=batches)
    load(tmp_path / "c", other, resumed)
    if batches != opt.batches:
        opt.flush()
    assert (other.note, other.seen) == ({"seed": 1}, 1)
    for name, entry in model.state_dict().items():
        assert isinstance(entry, dict) or torch.equal(entry, other.state_dict()[name]), name
    assert other.frozen not in resumed.state
    for one, two in zip(model.trained()[:-1], other.trained()[:-1], strict=True):
        assert torch.equal(one, two)
        states = opt.state[one], resumed.state[two]
        assert states[1]["arrived"] == states[0]["arrived"]
        for key in ("dual", "moment"):
            total, expected = (
                sum(a * state[f"{key}.{i}"] for i, a in enumerate(of.param_groups[0]["weights"]))
                for state, of in zip(states[::-1], (resumed, opt), strict=True)
            )
            assert total.dtype == expected.dtype
            torch.testing.assert_close(total, expected, rtol=0.01, atol=1e-12)


class Shrinking(SecondMoment):
    """Remembers something of another shape, and something that is counted."""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {**super().init(param), "norm": param.new_zeros(2), "count": torch.tensor(0)}

    def solve(self, problem: Any, state: Any) -> Any:
        d, new = super().solve(problem, state)
        norm = state["norm"] + problem.grad.norm()
        return d, {**new, "norm": norm, "count": state["count"] + 4}


def test_own_preconditioner(tmp_path: Path) -> None:
    def made(batches: int, seed: int) -> tuple[nn.Module, PISA]:
        model = network(seed=seed)
        return model, PISA(model.parameters(), Shrinking(), batches=batches)

    model, opt = made(3, 1)
    for step in range(4):
        opt.zero_grad()
        backward(model, step, step, torch.float64)
        opt.step()
    opt.flush()
    save(tmp_path / "c", model, opt)
    other, resumed = made(2, 5)
    load(tmp_path / "c", other, resumed)
    for param, own in zip(model.parameters(), other.parameters(), strict=True):
        old, new = opt.state[param], resumed.state[own]
        assert [new["count.0"], new["count.1"]] == [7, 4]  # of 8, 4, 4: means 6 2/3 and 4
        expected = (2 * old["norm.0"] + old["norm.1"]) / 3
        assert torch.allclose(new["norm.0"], expected, rtol=1e-12)


@pytest.mark.parametrize("batches", [3, 2])
def test_absence_that_only_the_device_knows_of(batches: int, tmp_path: Path) -> None:
    def made(batches: int, seed: int) -> tuple[nn.Module, SISA]:
        model = network(seed=seed)
        more: Any = {"capturable": True, "nonfinite": "skip", "lr": torch.tensor(0.5)}
        return model, SISA(model.parameters(), sigma=2.0, gamma=0.9, batches=batches, **more)

    model, opt = made(3, 1)
    for step in range(5):
        opt.zero_grad()
        backward(model, step, step, torch.float64)
        if step == 4:
            model[2].weight.grad.fill_(torch.nan)
        opt.step()
    assert opt.round.kept.tolist() == [True, False, False]
    save(tmp_path / "c", model, opt)
    export(tmp_path / "c", tmp_path / "c.pt")
    if batches != opt.batches:
        opt.flush()
    for path in (tmp_path / "c", tmp_path / "c.pt"):
        other, resumed = made(batches, 5)
        load(path, other, resumed)
        group = resumed.param_groups[0]
        assert all(isinstance(value, Tensor) for value in (*group["sigma"], group["lr"]))
        assert group["sigma"][0] == opt.param_groups[0]["sigma"][0]
        assert resumed.iteration == opt.iteration
        assert difference([weights(other)], weights(model)) < 1e-12
        if batches == opt.batches:
            assert torch.equal(resumed.round.kept, opt.round.kept)
        else:
            assert [resumed.state[other[0].bias][f"step.{slot}"] for slot in range(2)] == [2, 1]


def test_rules_stay(tmp_path: Path) -> None:
    def made(batches: int, factor: float) -> tuple[nn.Module, SISA]:
        model = network()
        return model, SISA(model.parameters(), gamma=lambda _: factor, batches=batches, sigma=2.0)

    model, opt = made(2, 0.5)
    backward(model, 0, 0, torch.float64)
    opt.step()
    save(tmp_path / "c", model, opt)
    export(tmp_path / "c", tmp_path / "c.pt")
    for batches, path in ((2, "c"), (3, "c"), (2, "c.pt")):
        other, resumed = made(batches, 0.25)
        load(tmp_path / path, other, resumed)
        resumed.flush()
        backward(other, 0, 0, torch.float64)
        resumed.step()
        assert resumed.param_groups[0]["sigma"] == [2.0 / 0.5 / 0.25] * batches


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)


def company(folder: Path) -> tuple[list[float], bool, Any]:
    """Two of three processes; their buffers differ, and so does their `extra`."""
    warnings.simplefilter("error")
    group = distributed.new_group([0, 1])
    distributed.barrier()
    rank = distributed.get_rank()
    if rank == 2:
        return [], True, None
    model = Normed()
    opt = SISA(model.parameters(), process_group=group)
    for buffer in model.buffers():
        buffer.fill_(rank + 5)
    save(folder, model, opt, {"rank": rank})
    for buffer in model.buffers():
        buffer.fill_(0)
    extra = load(folder, model, opt)
    return [buffer.flatten()[0].item() for buffer in model.buffers()], opt.synced, extra


def test_some_of_the_processes(tmp_path: Path) -> None:
    *two, _ = run(company, 3, tmp_path / "c")
    assert two == [([5, 5, 5], True, {"rank": 0})] * 2


def averaged(folder: Path) -> tuple[bool, bool]:
    """Without a process group all have the same; compiled and wrapped modules keep their names."""
    model = network()
    model[0] = checkpoint_wrapper(model[0])
    parallel = DistributedDataParallel(torch.compile(model, backend="eager"))
    opt = SISA(parallel.parameters(), batches=2)
    for node in here(3):
        opt.zero_grad()
        backward(parallel, node % 4, 0, torch.float64)
        opt.step()
    save(folder, parallel, opt)
    other = network(seed=5)
    resumed = SISA(other.parameters(), batches=2)
    load(folder, other, resumed)
    opt.flush()
    resumed.flush()
    states = zip(opt.state.values(), resumed.state.values(), strict=True)
    return identical([weights(model), weights(other)]), all(
        torch.equal(one["dual.0"], two["dual.0"]) for one, two in states
    )


def test_averaged_gradients(tmp_path: Path) -> None:
    assert run(averaged, 2, tmp_path / "c") == [(True, True)] * 2


# Bad input


def _params(*layers: nn.Module) -> list[nn.Parameter]:
    return [param for layer in layers for param in layer.parameters()]


def wider(*, bias: bool = True, sizes: tuple[int, int, int] = (6, 9, 7)) -> nn.Sequential:
    model = network()
    model[0] = nn.Linear(sizes[0], sizes[1], bias=bias).double()
    return model


MISFITS: dict[str, tuple[Any, Any, str]] = {
    "class": (network, lambda m: NSISA(m.parameters()), "optimizer must be a SISA.*got a NSISA"),
    "shape": (
        lambda: wider(sizes=(7, 9, 7)),
        lambda m: SISA(m.parameters()),
        r"model 0.weight must have the shape that was saved, shape \(9, 6\), got \(9, 7\)",
    ),
    "missing": (
        lambda: wider(bias=False),
        lambda m: SISA(m.parameters()),
        "model must be the one that was saved, got one without 0.bias, which the checkpoint has",
    ),
    "more": (
        lambda: network().append(nn.Linear(3, 1)),
        lambda m: SISA(m.parameters()),
        "got one with 5.bias, 5.weight, which the checkpoint does not have",
    ),
    "groups": (
        network,
        lambda m: SISA([{"params": _params(m[0])}, {"params": _params(m[2], m[4])}]),
        "optimizer must have 1 parameter groups, as the one that was saved, got 2",
    ),
    "parameters": (
        network,
        lambda m: SISA(_params(m[0], m[4])),
        "in group 0, got one that differs in 2.bias, 2.weight",
    ),
    "strangers": (
        network,
        lambda m: SISA(network().parameters()),
        r"optimizer must hold parameters of the model only, got one of shape \(9, 6\) in group 0",
    ),
    "torch's": (
        network,
        lambda m: torch.optim.Adam(m.parameters()),
        "PISA, SISA or NSISA, got Adam",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_does_not_fit_changes_nothing(case: str, kind: str, tmp_path: Path) -> None:
    model = network(seed=3)
    save(tmp_path / "folder", model, SISA(model.parameters(), batches=2))
    export(tmp_path / "folder", tmp_path / "file")
    make_model, make_opt, message = MISFITS[case]
    other = make_model()
    opt = make_opt(other)
    before = [param.detach().clone() for param in other.parameters()]
    settings_before = repr(opt.state_dict())
    with pytest.raises(ValueError, match=message):
        load(tmp_path / kind, other, opt)
    assert identical([before, list(other.parameters())])
    assert repr(opt.state_dict()) == settings_before


def test_other_state_does_not_fit(tmp_path: Path) -> None:
    model = network()
    save(tmp_path / "c", model, PISA(model.parameters(), SecondMoment()))
    opt = PISA(model.parameters(), Identity())
    with pytest.raises(ValueError, match=r"must have dual, moment for 0.weight.*got dual$"):
        load(tmp_path / "c", model, opt)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    model = network()
    opt = SISA(model.parameters())
    folder = tmp_path / "c"
    with pytest.raises(ValueError, match="where nothing is"):
        load(folder, model, opt)
    save(folder, model, opt)
    with pytest.raises(ValueError, match=r"file of torchpisa.distributed.export"):
        load(folder / "__0_0.distcp", model, opt)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"file of torchpisa.distributed.export"):
        load(tmp_path / "weights.pt", model, opt)
    export(folder, tmp_path / "c.pt")
    data = (tmp_path / "c.pt").read_bytes()
    for size in (0, len(data) // 2, len(data) - 1):
        (tmp_path / "c.pt").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"got '.*c.pt', which is cut off or"):
            load(tmp_path / "c.pt", model, opt)
    (tmp_path / "c.pt").unlink()
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    for read in (lambda: load(folder, model, opt), lambda: export(folder, tmp_path / "c.pt")):
        with pytest.raises(ValueError, match=r"__0_0.distcp is missing or cut off"):
            read()
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing or cut off"):
        load(folder, model, opt)
    index = (folder / ".metadata").read_bytes()
    for size in (0, len(index) // 2):
        (folder / ".metadata").write_bytes(index[:size])
        for read in (lambda: load(folder, model, opt), lambda: export(folder, tmp_path / "c.pt")):
            with pytest.raises(ValueError, match=r"complete checkpoint, .*c', whose .metadata is"):
                read()
    assert not (tmp_path / "c.pt").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_tensors(model.state_dict(), checkpoint_id=tmp_path / "other")
    with pytest.raises(ValueError, match=r"folder of torchpisa.distributed.save.*something else"):
        load(tmp_path / "other", model, opt)


def test_a_folder_is_no_file_to_export_to(tmp_path: Path) -> None:
    """Not found out after writing: what is left would be in the way of the next `save`."""
    model = network()
    opt = SISA(model.parameters())
    folder = tmp_path / "c"
    save(folder, model, opt)
    with pytest.raises(ValueError, match=r"file must be a file, got '.*c', which is a folder"):
        export(folder, folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    save(folder, model, opt)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = network()
    opt = SISA(model.parameters())
    (tmp_path / "full" / "of").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="directory must be new, empty or an earlier"):
            save(tmp_path / name, model, opt)
    with pytest.raises(ValueError, match="extra must be a dictionary or None, got 3"):
        save(tmp_path / "c", model, opt, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"extra must be made of .* got \{'path': .*Path"):
        save(tmp_path / "c", model, opt, {"path": tmp_path})
    opt.param_groups[0]["mine"] = tmp_path
    with pytest.raises(ValueError, match="param_groups must be made of"):
        save(tmp_path / "c", model, opt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def refused(case: str, folder: Path) -> str:
    rank = distributed.get_rank()
    going = Run(Layout("ddp" if case == "begun" else "plain", replicas=2, batches=2), SISA)
    extra: Any = None
    if case == "extra":
        extra = {"bad": folder} if rank else {}
    elif case == "point":
        going.train(0, rank)
    elif case == "begun":
        going.train(0, 1)
        backward(going.model, going.nodes[1], 0, torch.float64)
    else:
        save(folder, going.model, going.opt)
        folder = folder if rank else folder / "nowhere"
    try:
        (load if case == "path" else save)(
            folder, going.model, going.opt, *[extra][: case != "path"]
        )
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("extra", "extra must be made of"),
        (
            "point",
            "all ranks must save at the same point, got rank 0 before iteration 0 and rank 1",
        ),
        ("begun", "optimizer must not be between backward"),
        ("path", "where nothing is"),
    ],
)
def test_refused_on_all_ranks(case: str, message: str, tmp_path: Path) -> None:
    results = run(refused, 2, case, tmp_path / "c")
    assert all(message in result for result in results)


# The mapping


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        ([1.0], [0.25, 0.75], [{0: 1.0}, {0: 1.0}]),
        ([0.25, 0.75], [1.0], [{0: 0.25, 1: 0.75}]),
        ([0.5, 0.5], [0.25, 0.75], [{0: 1.0}, {0: 1 / 3, 1: 2 / 3}]),
        ([0.1] * 10, [0.3, 0.7], [{i: 1 / 3 for i in range(3)}, {i: 1 / 7 for i in range(3, 10)}]),
        ([0.5, 0.5], [0.5, 1e-14, 0.5], [{0: 1.0}, {1: 1.0}, {1: 1.0}]),
    ],
)
def test_overlaps(old: list[float], new: list[float], rows: list[dict[int, float]]) -> None:
    found = remap.overlaps(old, new)
    assert [list(row) for row in found] == [list(row) for row in rows]
    for row, expected in zip(found, rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-14)
