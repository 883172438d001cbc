"""Whole matrices of which processes hold parts or copies: one process does what is done to each."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.problem import backward, difference, network
from tests.distributed.processes import run
from torchpisa import MISA, SISA
from torchpisa.distributed import dtensor, owners
from torchpisa.kernels import newton_schulz
from torchpisa.preconditioners.consensus import EigenbasisMoment, Whiten

ROWS, COLS, COPIES = Shard(0), Shard(1), Replicate()


def mesh_for(placements: list[Any]) -> DeviceMesh:
    """A mesh of one dimension per placement; of two, the first has size 2."""
    size = distributed.get_world_size()
    if len(placements) == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))


def distributed_like(tensor: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """Return the same as `distribute_tensor`, without sending a tensor that all processes have."""
    copies = DTensor.from_local(tensor, mesh, [COPIES] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, placements)


# The exchange

# Tall, wide, square; fewer rows than processes; a convolution.
SHAPES = [(8, 3), (8, 3), (5, 7), (1, 4), (3, 2, 2), (16, 16), (2, 9)]
STACKS = [(6, 4, 3), (6, 4, 3), (6, 2, 5)]
FUSED = [(12, 5), (6, 3), (18, 2, 2)]

# Shapes, blocks, placements, whether replicas share the work, elements that travel together.
EXCHANGES: list[tuple[list[Any], int, list[Any], bool, int]] = [
    *((SHAPES, 1, [how], False, 2**23) for how in (ROWS, COLS, COPIES)),
    *((SHAPES, 1, [COPIES, how], shared, 40) for how in (ROWS, COLS) for shared in (False, True)),
    (SHAPES, 1, [ROWS, COPIES], False, 2**23),
    (SHAPES, 1, [ROWS, COLS], False, 2**23),
    *((STACKS, 6, [how], False, 10) for how in (ROWS, COLS, Shard(2))),
    *((STACKS, 6, [COPIES, how], True, 10) for how in (ROWS, Shard(2))),
    *((FUSED, 3, [how], False, 2**23) for how in (ROWS, COLS)),
    (FUSED, 3, [COPIES, ROWS], True, 10),
]


def turned(block: Tensor) -> Tensor:
    """Something that moves every element, and needs to know where a block begins and ends."""
    return block.flip(tuple(range(block.dim()))) + torch.arange(block.numel()).view(block.shape)


def exchange(shapes: Any, blocks: int, placements: Any, shared: bool, most: int) -> list[str]:
    """Check the results of an exchange; return the work that this process was given in it."""
    owners._TRIP_ELEMENTS = most
    torch.manual_seed(0)
    matrices = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mesh = mesh_for(placements)
    wholes = [distributed_like(matrix, mesh, placements) for matrix in matrices]
    beside = [torch.randn(3 * n + 1, 2, dtype=torch.float64) for n in range(len(shapes))]
    once = blocks == 1 and owners.is_sharded_once(wholes[0])
    spread = [
        owners.shard_rows_like(full, w) if once else w
        for full, w in zip(beside, wholes, strict=True)
    ]
    done = []

    def solve(given: list[list[Tensor]]) -> list[list[Tensor]]:
        done.extend(f"{block.sum():.9f}" for block, _ in given)
        return [[other + 1, turned(block)] for block, other in given]

    tensors = [[w, s] for w, s in zip(wholes, spread, strict=True)]
    results = owners.by_owners(
        [list(map(dtensor.local, of_matrix)) for of_matrix in tensors],
        tensors,
        solve,
        returned=(1, 0),
        blocks=blocks,
        replicas=mesh.get_group("replicate") if shared else None,
    )
    for matrix, other, (changed, part) in zip(matrices, spread, results, strict=True):
        expected = torch.cat([turned(block) for block in matrix.chunk(blocks)])
        expected = dtensor.local(distributed_like(expected, mesh, placements))
        torch.testing.assert_close(part, expected, rtol=0, atol=0)
        torch.testing.assert_close(changed, dtensor.local(other) + 1, rtol=0, atol=0)
    return done


def exchanges() -> list[list[str]]:
    return [exchange(*how) for how in EXCHANGES]


@pytest.fixture(scope="module")
def done() -> list[list[list[str]]]:
    """By rank and exchange, which matrices were worked on; all in one start of the processes."""
    return run(exchanges, 4)


@pytest.mark.xdist_group("exchanges")
@pytest.mark.parametrize("number", range(len(EXCHANGES)))
def test_each_matrix_is_worked_on_once(done: list[list[list[str]]], number: int) -> None:
    shapes, blocks, placements, shared, _ = EXCHANGES[number]
    by_rank = [of_rank[number] for of_rank in done]
    count = len(shapes) * blocks
    if placements in ([COPIES], [ROWS, COLS]):  # nothing to share, or nobody to ask
        times = 4
    else:
        times = 2 if COPIES in placements and not shared else 1
    names = [name for of_rank in by_rank for name in of_rank]
    assert len(set(names)) == count
    assert all(names.count(name) == times for name in names)
    # Six entries of a stack are in the hands of three processes, or of two in each replica.
    held_by = 3 if shapes is STACKS and placements == [ROWS] else 4
    assert sum(bool(of_rank) for of_rank in by_rank) == held_by


def test_owners_have_equal_shares() -> None:
    large, small = owners._Task(64, 64, None), owners._Task(16, 16, None)
    trips = owners._trips((large,) * 8 + (small,) * 4, 2, 2, 2**23)
    work: dict[Any, int] = {}
    for trip in trips:
        for number, replica, owner in trip:
            size = 64 if number < 8 else 16
            work[replica, owner] = work.get((replica, owner), 0) + size**3
    assert len(work) == 4
    assert len(set(work.values())) == 1


def test_a_trip_keeps_all_processes_busy() -> None:
    trips = owners._trips((owners._Task(64, 64, None),) * 12, 1, 4, 64 * 64)
    assert [len({owner for _, _, owner in trip}) for trip in trips] == [4, 4, 4]


def test_whoever_holds_all_of_a_matrix_owns_it() -> None:
    layout = owners._Layout((6, 4, 3), 0, None, 4)
    work = [owners._task(layout, block, 6) for block in range(6)]
    assert work == [owners._Task(4, 3, holder) for holder in (0, 0, 1, 1, 2, 2)]
    assert [owner for trip in owners._trips(tuple(work), 1, 4, 100) for _, _, owner in trip] == [
        *(0, 0, 1, 1, 2, 2)
    ]
    assert owners._task(layout._replace(shape=(12, 5)), 1, 3) == owners._Task(4, 5, None)
    assert owners._task(layout._replace(dim=1), 0, 6).holder is None


# MISA on many processes equals MISA on one

PARAMS: dict[str, tuple[int, ...]] = {
    "tall": (9, 4),
    "wide": (3, 8),
    "alike": (9, 4),
    "tiny": (2, 3),
    "square": (8, 8),
    "filters": (6, 2, 3),
    "fused": (12, 4),
    "experts": (4, 6, 4),
    "embedding": (7, 4),
    "bias": (5,),
}


def start_values(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in PARAMS.items()
    }


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + list(PARAMS).index(name))
    return torch.randn(PARAMS[name], generator=generator, dtype=torch.float64).to(dtype)


def optimizer(params: dict[str, nn.Parameter], **settings: Any) -> MISA:
    def named(*names: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, params[name]) for name in names]

    before = settings.pop("before", None)
    groups = [
        {"params": named("tall", "wide", "alike", "tiny", "square", "filters"), "before": before},
        {"params": named("fused"), "blocks": 3, "before": before},
        {"params": named("experts"), "blocks": 4, "before": before},
        {"params": named("embedding", "bias"), "matrix": None},
    ]
    return MISA(groups, lr=0.03, **settings)


def misa(
    spread: Any,
    steps: int = 4,
    dtype: torch.dtype = torch.float64,
    absent: Any = None,
    grad_scale: float | None = None,
    **settings: Any,
) -> dict[str, nn.Parameter]:
    """Train; `spread` makes this process's tensors of whole ones, `absent` leaves gradients out."""
    params = {name: nn.Parameter(spread(w)) for name, w in start_values(dtype).items()}
    opt = optimizer(params, **settings)
    for step in range(steps):
        for name, param in params.items():
            grad = spread((grad_scale or 1) * gradient(name, step, dtype))
            param.grad = None if absent and absent(name, step) else grad
        if grad_scale is not None:  # as GradScaler calls it
            opt.grad_scale = torch.tensor(grad_scale)
            opt.found_inf = torch.tensor(float(step == 2))
        opt.step()
    opt.flush()
    return params


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def misa_on_processes(placements: Any, shared: bool, **settings: Any) -> list[Tensor]:
    """With `placements` None, every process has plain copies, as under DDP."""
    owners._TRIP_ELEMENTS = settings.pop("stage", 2**23)
    mesh = mesh_for(placements or [COPIES])

    def spread(tensor: Tensor) -> Tensor:
        if placements is None:
            return tensor
        # Vectors have rows only, and small parameters may be cut in another way than large ones.
        usable = [ROWS if p == COLS and tensor.dim() < 2 else p for p in placements]
        return distributed_like(tensor, mesh, usable)

    if shared:
        settings["replicas"] = distributed.group.WORLD if placements is None else mesh["replicate"]
    return [whole(param) for param in misa(spread, **settings).values()]


WAYS: list[tuple[Any, bool, dict[str, Any]]] = [
    ([ROWS], False, {}),
    ([ROWS], False, {"dtype": torch.float32}),
    ([ROWS], False, {"stage": 10, "clip": 0.5}),
    ([ROWS], False, {"foreach": False, "damping": 0.1}),
    ([ROWS], False, {"before": Whiten(every=2)}),
    ([ROWS], False, {"before": EigenbasisMoment("both", every=2), "foreach": False}),
    ([ROWS], False, {"before": EigenbasisMoment(every=2), "batches": 2, "stage": 10}),
    ([ROWS], False, {"grad_scale": 8.0, "before": Whiten(every=2)}),
    ([COLS], False, {"clip": 0.5}),
    ([COLS], False, {"dtype": torch.float32, "row_beta": None}),
    ([COLS], False, {"before": Whiten(every=2), "batches": 2}),
    ([COPIES, ROWS], False, {"clip": 0.5}),
    ([COPIES, ROWS], True, {"clip": 0.5, "stage": 10}),
    ([COPIES, ROWS], True, {"before": EigenbasisMoment(every=2)}),
    ([COPIES, COLS], True, {"dtype": torch.float32, "state_dtype": torch.float32}),
    ([ROWS, COLS], False, {"damping": 0.1}),
    ([ROWS], False, {"before": Whiten(every=2), "damping": 0.1, "row_beta": None, "clip": 0.5}),
    ([COPIES, COLS], True, {"before": Whiten(every=2), "damping": 0.1, "foreach": False}),
    ([COPIES], False, {}),
    (None, True, {}),
    (None, True, {"before": EigenbasisMoment(every=2), "damping": 0.1, "clip": 0.5, "batches": 2}),
    (None, True, {"dtype": torch.float32, "clip": 0.5, "stage": 10}),
    (None, True, {"foreach": False, "row_beta": None}),
    (None, True, {"before": Whiten(every=2), "batches": 3}),
    (None, True, {"grad_scale": 8.0, "capturable": True}),
]
IDS = [f"{number}-{placements}-{shared}" for number, (placements, shared, _) in enumerate(WAYS)]


def misa_in_all_ways() -> list[list[Tensor]]:
    return [misa_on_processes(placements, shared, **more) for placements, shared, more in WAYS]


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[list[list[Tensor]]]:
    """By rank and way, the parameters; all in one start of the processes."""
    return run(misa_in_all_ways, request.param)


@pytest.mark.xdist_group("misa")
@pytest.mark.parametrize("number", range(len(WAYS)), ids=IDS)
def test_misa_equals_one_process(results: list[list[list[Tensor]]], number: int) -> None:
    more = {key: value for key, value in WAYS[number][2].items() if key != "stage"}
    expected = [whole(param) for param in misa(lambda tensor: tensor, **more).values()]
    found = [of_rank[number] for of_rank in results]
    for of_rank in found:
        assert all(map(torch.equal, of_rank, found[0])), "ranks differ"
    tolerance = 1e-6 if more.get("dtype") == torch.float32 else 1e-12
    if isinstance(more.get("before"), EigenbasisMoment):
        tolerance = 1e-10  # eigenvectors of close eigenvalues turn with the order of sums
    assert difference(found, expected) <= tolerance


# Who orthogonalises, and what crosses the network


def counted(placements: Any, shared: bool) -> tuple[int, int]:
    """Return how many matrices this process orthogonalises in a step, and its collectives."""
    solved, collectives = [], []
    plain = newton_schulz.orthogonalize

    def counting(bs: Any, *args: Any) -> list[Tensor]:
        solved.append(len(bs))
        return plain(bs, *args)

    def noting(call: Any, *args: Any, **more: Any) -> Any:
        collectives.append(call)
        return call(*args, **more)

    newton_schulz.orthogonalize = counting
    for name in ("all_to_all_single", "broadcast", "all_reduce"):
        setattr(distributed, name, partial(noting, getattr(distributed, name)))
    misa_on_processes(placements, shared, steps=1)
    return sum(solved), len(collectives)


MATRICES = 6 + 3 + 4


def test_matrices_are_orthogonalised_once_when_sharded() -> None:
    solved = [matrices for matrices, _ in run(counted, 4, [ROWS], False)]
    assert sum(solved) == MATRICES


def test_matrices_are_orthogonalised_once_by_replicas() -> None:
    results = run(counted, 2, None, True)
    assert sum(matrices for matrices, _ in results) == MATRICES
    # Two for each of three groups of matrices, and the word on who has gradients.
    assert [collectives for _, collectives in results] == [7, 7]


def test_replicas_do_all_unless_told() -> None:
    assert run(counted, 2, None, False) == [(MATRICES, 0)] * 2


# Gradients that some ranks do not have


def without_gradients(placements: Any, shared: bool) -> list[Tensor]:
    """Rank 1 has no gradient for some parameters in some steps, and nobody has one for others."""
    rank = distributed.get_rank()

    def absent(name: str, step: int) -> bool:
        return (rank == 1 and (name, step) in ONLY_ELSEWHERE) or (name, step) in NOWHERE

    return misa_on_processes(placements, shared, steps=6, absent=absent)


ONLY_ELSEWHERE = {("tall", 1), ("fused", 1), ("bias", 2), ("experts", 3), ("square", 4)}
NOWHERE = {("wide", 1), ("square", 2), ("embedding", 2), ("fused", 3), ("tall", 5)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_gradient(ranks: int) -> None:
    """Its part of a sharded gradient is zero."""

    def spread_with_zeros(name: str, step: int) -> Tensor:
        grad = gradient(name, step, torch.float64)
        if (name, step) in ONLY_ELSEWHERE:
            chunk = -(-grad.size(0) // ranks)
            grad[chunk : 2 * chunk] = 0
        return grad

    params = {name: nn.Parameter(w) for name, w in start_values(torch.float64).items()}
    opt = optimizer(params)
    for step in range(6):
        for name, param in params.items():
            param.grad = None if (name, step) in NOWHERE else spread_with_zeros(name, step)
        opt.step()
    found = run(without_gradients, ranks, [ROWS], False)
    assert difference(found, [whole(param) for param in params.values()]) <= 1e-12


def test_a_replica_without_gradient_joins() -> None:
    """Ranks that a gradient has reached take the step of one process; the other has zero there."""
    complete, lacking = run(without_gradients, 2, None, True)
    expected = misa(lambda w: w, 6, absent=lambda name, step: (name, step) in NOWHERE)
    never = [name for name in PARAMS if name not in dict(ONLY_ELSEWHERE)]
    for name, one, other in zip(PARAMS, complete, lacking, strict=True):
        if name in never:
            assert difference([[one], [other]], [whole(expected[name])]) <= 1e-12
        else:
            assert one.isfinite().all()
            assert other.isfinite().all()


# Checkpoints

STAGES = [None, Whiten(every=2), EigenbasisMoment("both", every=3)]


def sharded(stage: Any) -> tuple[nn.Module, MISA]:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model, MISA(model.named_parameters(), before=stage)


def steps(model: nn.Module, opt: MISA, numbers: range) -> list[Tensor]:
    for number in numbers:
        opt.zero_grad()
        backward(model, 0, number, torch.float64)
        opt.step()
    return [whole(param) for param in model.parameters()]


def saved(folder: Path, stage: Any) -> list[Tensor]:
    """Save after four steps, in parts and in one file; return the weights after seven."""
    model, opt = sharded(stage)
    steps(model, opt, range(4))
    for state in opt.state_dict()["state"].values():
        assert all(isinstance(value, DTensor) for key, value in state.items() if key != "step")
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "model")
    parts = get_optimizer_state_dict(model, opt)
    checkpoint.save(parts, checkpoint_id=folder / "optimizer")
    one_file = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, opt, options=one_file)
    if distributed.get_rank() == 0:
        torch.save(state, folder / "optimizer.pt")
    return steps(model, opt, range(4, 7))


def resumed(folder: Path, stage: Any, from_one_file: bool) -> list[Tensor]:
    model, opt = sharded(stage)
    weights = {"model": model.state_dict()}
    checkpoint.load(weights, checkpoint_id=folder / "model")
    model.load_state_dict(weights["model"])
    options = StateDictOptions()
    if from_one_file:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = torch.load(folder / "optimizer.pt") if distributed.get_rank() == 0 else {}
    else:
        state = get_optimizer_state_dict(model, opt)
        checkpoint.load(state, checkpoint_id=folder / "optimizer")
    set_optimizer_state_dict(model, opt, state, options=options)
    return steps(model, opt, range(4, 7))


def saved_and_resumed(folder: Path) -> list[tuple[list[Tensor], list[Tensor]]]:
    results = []
    for number, stage in enumerate(STAGES):
        through = saved(folder / str(number), stage)
        results.append((through, resumed(folder / str(number), stage, False)))
    return results


def resumed_in_both_ways(folder: Path) -> list[list[list[Tensor]]]:
    return [
        [resumed(folder / str(number), stage, one_file) for one_file in (False, True)]
        for number, stage in enumerate(STAGES)
    ]


def test_resume(tmp_path: Path) -> None:
    on_two = run(saved_and_resumed, 2, tmp_path)
    for of_rank in on_two:
        for through, again in of_rank:
            assert all(map(torch.equal, through, again))
    for of_rank in run(resumed_in_both_ways, 3, tmp_path):
        for (through, _), ways in zip(on_two[0], of_rank, strict=True):
            assert difference(ways, through) <= 1e-10


# Wrong input


def refused() -> list[str]:
    messages = []
    matrix = torch.randn(8, 6)
    mesh = mesh_for([ROWS, COLS])
    plain = nn.Parameter(matrix.clone())
    by_rows = nn.Parameter(distributed_like(matrix, mesh["shard"], [ROWS]))
    both_ways = nn.Parameter(distributed_like(matrix, mesh, [ROWS, COLS]))
    cases: list[tuple[nn.Parameter, dict[str, Any]]] = [
        (plain, {"replicas": mesh}),
        (plain, {"replicas": "all"}),
        (by_rows, {"replicas": mesh["shard"]}),
        (by_rows, {"replicas": distributed.group.WORLD}),
        (both_ways, {"before": Whiten()}),
    ]
    for param, settings in cases:
        with pytest.raises(ValueError, match=r"must be") as told:
            MISA([param], **settings)
        messages.append(str(told.value))
    MISA([by_rows], replicas=mesh["replicate"], before=Whiten())
    return messages


def test_wrong_input_is_refused() -> None:
    expected = [
        r"replicas must be a process group or a mesh of one dimension, got one of 2: .*'replicate'",
        r"replicas must be a torch.distributed process group .*, got 'all'",
        r"replicas must be processes that hold the same, .* shape \(8, 6\) is sharded over ranks",
        r"replicas must be processes that hold the same, .* shape \(8, 6\) is sharded over ranks",
        r"before must be None for parameters that are sharded along several dimensions .*\(8, 6\)",
    ]
    for told in run(refused, 4):
        for message, pattern in zip(told, expected, strict=True):
            assert re.match(pattern, message), message


# Norms over parts, of which replicas have copies


def clipped(make: Any, shared: bool) -> list[Tensor]:
    model, mesh = network(), mesh_for([COPIES, ROWS])
    fully_shard(model, mesh=mesh)
    more = {"replicas": mesh["replicate"]} if shared else {}
    return clipped_steps(make, model, **more)


def clipped_steps(make: Any, model: nn.Module, **more: Any) -> list[Tensor]:
    opt = make(model.parameters(), clip=0.3, **more)
    for step in range(4):
        opt.zero_grad()
        backward(model, 0, step, torch.float64)
        opt.step()
    return [whole(param) for param in model.parameters()]


@pytest.mark.parametrize(("make", "shared"), [(MISA, False), (MISA, True), (SISA, False)])
def test_hsdp_with_clipping_equals_one_process(make: Any, shared: bool) -> None:
    assert difference(run(clipped, 4, make, shared), clipped_steps(make, network())) <= 1e-12
