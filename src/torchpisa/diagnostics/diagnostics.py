"""`Diagnostics`: choose the rounds to measure, and bring the numbers to the host."""

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpisa.checks import check_count
from torchpisa.diagnostics import measure, output
from torchpisa.diagnostics.output import Row, RowContext
from torchpisa.diagnostics.sampling import SampleLayout
from torchpisa.distributed.process_group import Ranks
from torchpisa.optim import NSISA
from torchpisa.optim.pisa import PISA

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Diagnostics"]

# Mean cosine between the duals of two batches below which NSISA warns. On digits it is -0.3 to 0.05
# for parts without a common label and 0.2 to 0.7 for shuffled parts, with 2 to 10 batches of 4
# samples to all of a part; tests/diagnostics/test_disagreement.py trains both.
_LEAST_AGREEMENT = 0.1


class _PendingRow(NamedTuple):
    """Numbers that are being copied from the device to the host."""

    values: Tensor
    context: RowContext
    event: torch.cuda.Event | None


class Diagnostics:
    r"""An observer of an optimizer that measures one round in `every`, as a row of numbers.

    The training does not change. At the end of a measured round weights and duals are compared with
    copies from the end of the round before. Up to 65,536 coordinates are sampled, in short runs
    from every tensor, and norms are extrapolated from them. Smaller models are measured completely.
    (With more than four batches per process, up to 262,144 duals are sampled.)

    With \(\sigma_i\) and \(\rho_i\) divided by lr, over all batches of all ranks, a row has:

    - `iteration`: the number of rounds done.
    - `primal_residual`: \(\sqrt{\sum_i \alpha_i \lVert w_i - w \rVert^2}\), how far the batches
      pull the weights apart; `primal_relative`: the same by `weight_norm`. Not with `dual_decay=0`.
    - `dual_residual`:
      \(\sqrt{\sum_i \alpha_i \lVert \sigma_i (w^{\ell+1} - w^\ell) \rVert^2}\), how far the round
      moved the weights, in the units of gradients; `dual_relative`: the same by `dual_norm`.
    - `weight_norm`: \(\lVert w \rVert\).
    - `dual_norm`: \(\sqrt{\sum_i \alpha_i \lVert \pi_i \rVert^2}\).
    - `spread`: \(\sqrt{\sum_i \alpha_i \lVert \pi_i - \bar\pi \rVert^2}\) by `dual_norm`, with
      \(\bar\pi = \sum_i \alpha_i \pi_i\): 0 if all batches have the same dual, 1 if the duals
      cancel. Not with a single batch.
    - `step_min`, `step_median`, `step_max`: of \(\mathrm{lr}/S\), over parameters.
    - `first_step_...` and `momentum_...`: see `torchpisa.optim.report.Effective`; over coordinates
      and batches. Not for preconditioners without a diagonal.
    - `sigma_share`: share of these where \(\sigma_i > \rho_i q\).
    - `absent`: the number of absent batches since training began: their gradients were not finite,
      or `skip()` or `flush()` was called.

    It warns once if the batches of an `NSISA` hardly agree: if the mean cosine between the duals of
    two batches, \((1 - \mathrm{spread}^2 - 1/m) / (1 - 1/m)\) for equal weights, is below 0.1 in
    two consecutive rows. Then the data of the batches differ, or their gradients are mostly noise,
    and NSISA may stop where orthogonalised gradients cancel but gradients do not.

    On a GPU no step waits: a row is delivered some steps after its round, and only `latest` and
    `close` wait for it. Rounds that are replayed from a CUDA graph are not measured.

    With a process group or sharded parameters, all processes create one with the same `every`,
    between the same two steps. They get the same rows, and the first process writes the files.

    Args:
        optimizer: a `PISA`, `SISA` or `NSISA`.
        every: the number of rounds from row to row.
        csv: a file to append rows to, also when training is resumed.
        tensorboard: a writer with `add_scalar(tag, value, step)`, such as torch's `SummaryWriter`.
        callback: a function that is called with every row, within `step()`.

    Examples:
        >>> import torch, torchpisa
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = torchpisa.PISA([w], sigma=1.0, rho=4.0)
        >>> with Diagnostics(opt, every=10) as watch:
        ...     for _ in range(100):
        ...         opt.zero_grad()
        ...         (0.5 * (w - 1) ** 2).sum().backward()
        ...         opt.step()
        >>> watch.latest["iteration"], round(watch.latest["momentum_median"], 3)
        (100, 0.8)
    """

    def __init__(
        self,
        optimizer: PISA,
        *,
        every: int = 200,
        csv: str | os.PathLike[str] | None = None,
        tensorboard: output.ScalarWriter | None = None,
        callback: Callable[[Row], object] | None = None,
    ) -> None:
        if not isinstance(optimizer, PISA):
            raise ValueError(
                "optimizer must be a PISA, SISA or NSISA, which have a dual for each batch, got "
                f"{type(optimizer).__name__}"
            )
        check_count("every", every)
        if callback is not None and not callable(callback):
            raise ValueError(f"callback must be a function of a row, got {callback!r}")
        self._optimizer = optimizer
        self._every = every
        self._layout: SampleLayout | None = None
        self._before: measure.RoundSnapshot | None = None
        self._pending: _PendingRow | None = None
        self._latest: Row = {}
        self._outputs: list[Callable[[Row], object]] = []
        self._disagreeing_rows = 0  # in succession
        if isinstance(optimizer, NSISA):
            self._outputs.append(self._warn_of_disagreement)
        if isinstance(optimizer.peers, Ranks):
            optimizer.peers.agree("every", every)
        if all(group.rank() == 0 for group in measure.process_groups(optimizer)):
            if csv is not None:
                self._outputs.append(output.CsvFile(csv).write)
            if tensorboard is not None:
                self._outputs.append(output.TensorBoardWriter(tensorboard).write)
        if callback is not None:
            self._outputs.append(callback)
        optimizer.observers += (self._on_round_end,)
        begun = optimizer.peers is not None and optimizer.peers.step_begun
        if self._measures_next_round and optimizer.synced and not begun:
            with torch.no_grad():
                self._before = self._take_snapshot()

    @property
    def latest(self) -> Row:
        """Return the last row by name; empty before the first."""
        self._deliver_pending(wait=True)
        return dict(self._latest)

    def close(self) -> None:
        """Stop observing, after the last row has been delivered."""
        observers = self._optimizer.observers
        self._optimizer.observers = tuple(each for each in observers if each != self._on_round_end)
        self._before = self._layout = None
        self._deliver_pending(wait=True)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_round_end(self) -> None:
        """Measure the round that has ended, if it is due. Called under `no_grad`."""
        before = self._before
        idle = before is None and self._pending is None and not self._measures_next_round
        if idle or _in_graph_capture():
            return
        self._deliver_pending()
        now = self._before = None
        if before is not None and self._comparable(before):
            now = measure.take_snapshot(self._optimizer, before.layout)
            self._measure_round(before, now)
        if self._measures_next_round:
            self._before = now or self._take_snapshot()

    def _comparable(self, before: measure.RoundSnapshot) -> bool:
        """Return True if one round has ended since, no state was loaded and no parameter is new."""
        optimizer = self._optimizer
        previous = (optimizer.iteration - 1, optimizer.instance_id)
        is_previous = (before.iteration, before.instance_id) == previous
        return is_previous and before.layout.matches(optimizer)

    @property
    def _measures_next_round(self) -> bool:
        """Return True if the next round is to be measured."""
        return not (self._optimizer.iteration + 1) % self._every

    def _take_snapshot(self) -> measure.RoundSnapshot | None:
        if self._layout is None or not self._layout.matches(self._optimizer):
            self._layout = SampleLayout(self._optimizer)
        if not any(self._layout.sizes):
            return None
        return measure.take_snapshot(self._optimizer, self._layout)

    def _measure_round(self, before: measure.RoundSnapshot, now: measure.RoundSnapshot) -> None:
        """Start the measurement of the round that has just ended."""
        self._deliver_pending(wait=True)
        optimizer, layout = self._optimizer, now.layout
        values = measure.measure(optimizer, before, now)
        event = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(values.device))
            values = on_host
        ranks = optimizer.param_groups[0]["ranks"]
        context = RowContext(
            iteration=now.iteration,
            nodes=optimizer.batches * ranks,
            ranks=ranks,
            shards=layout.shards,
            dual_kept=all(section.dual_decay for section in layout.sections),
            sizes=layout.sizes,
        )
        self._pending = _PendingRow(values, context, event)
        self._deliver_pending()

    def _warn_of_disagreement(self, row: Row) -> None:
        """Warn once if the batches hardly agree in two rows in succession."""
        optimizer = self._optimizer
        nodes = optimizer.batches * optimizer.param_groups[0]["ranks"]
        if nodes == 1 or not row["dual_norm"] > 0:
            return
        # For unequal shares the true cosine is smaller, so this rather warns too little.
        agreement = (1 - row["spread"] ** 2 - 1 / nodes) / (1 - 1 / nodes)
        self._disagreeing_rows = self._disagreeing_rows + 1 if agreement < _LEAST_AGREEMENT else 0
        if self._disagreeing_rows == 2:
            self._outputs.remove(self._warn_of_disagreement)
            warnings.warn(
                f"the {nodes} batches hardly agree at iteration {row['iteration']:.0f}: the mean "
                f"cosine between their duals is {agreement:.2f}. NSISA settles where "
                "orthogonalised gradients cancel, which is no stationary point of the loss when "
                "batches differ; use MISA or SISA, or shuffle the data",
                UserWarning,
                stacklevel=2,
            )

    def _deliver_pending(self, wait: bool = False) -> None:
        """Hand out the pending row if it has arrived, or when it has if `wait`."""
        pending = self._pending
        if pending is None:
            return
        if pending.event is not None:
            if wait:
                pending.event.synchronize()
            elif not pending.event.query():  # type: ignore[no-untyped-call]
                return
        self._pending = None
        self._latest = output.make_row(pending.values.tolist(), pending.context)
        for write in tuple(self._outputs):
            write(dict(self._latest))


def _in_graph_capture() -> bool:
    """Return True while a CUDA graph is captured, which measurements must not enter."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())
