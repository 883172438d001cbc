"""`Diagnostics`: when to look, and how the numbers reach the host."""

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpisa.checks import check_count
from torchpisa.diagnostics import measure, rows
from torchpisa.diagnostics.rows import About, Row
from torchpisa.diagnostics.sample import Layout
from torchpisa.distributed.process_group import Ranks
from torchpisa.optim import NSISA
from torchpisa.optim.pisa import PISA

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Diagnostics"]

# Mean cosine between the duals of two batches under which NSISA warns. On digits it is -0.3 to 0.05
# where parts share no label and 0.2 to 0.7 where parts are shuffled, for 2 to 10 batches of 4
# samples to all of a part; tests/diagnostics/test_disagreement.py trains both.
_AGREEMENT = 0.1


class _Sent(NamedTuple):
    """Numbers on their way from the device."""

    values: Tensor
    about: About
    event: torch.cuda.Event | None


class Diagnostics:
    r"""Watches an optimizer, and describes every so many rounds by a row of numbers.

    The training does not change. When a round ends that is to be measured, weights and duals are
    compared with copies from the end of the round before: not all of them, but up to 65,536
    coordinates, in short runs from every tensor, from which norms are extrapolated. Smaller models
    are measured completely. (With more than four batches per process, up to 262,144 duals.)

    With \(\sigma_i\) and \(\rho_i\) divided by lr, over all batches of all ranks, a row has:

    - `iteration`: rounds done.
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
    - `absent`: batches that were left out since training began: their gradients were not finite, a
      GradScaler said so, or `skip()` or `flush()` was called.

    Of an `NSISA` whose batches hardly agree, it warns once: where the mean cosine between the
    duals of two batches, \((1 - \mathrm{spread}^2 - 1/m) / (1 - 1/m)\) for equal weights, is below
    0.1 in two rows in a row. Then the data of the batches differ, or their gradients are mostly
    noise. Where orthogonalised gradients of such batches cancel, gradients need not.

    On a GPU nothing waits: a row is delivered some steps after its round, and `latest` and `close`
    wait for it. Rounds that are replayed from a CUDA graph are not seen.

    With a process group or sharded parameters, all processes make one with the same `every`,
    between the same two steps, and have the same rows. The first of them writes the files.

    Args:
        optimizer: a `PISA`, `SISA` or `NSISA`.
        every: rounds from row to row.
        csv: a file that rows are appended to, also when training is resumed.
        tensorboard: a writer with `add_scalar(tag, value, step)`, such as torch's `SummaryWriter`.
        callback: called with every row, within `step()`.

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
        tensorboard: rows.Writer | None = None,
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
        self._layout: Layout | None = None
        self._before: measure.Snapshot | None = None
        self._sent: _Sent | None = None
        self._latest: Row = {}
        self._outputs: list[Callable[[Row], object]] = []
        self._apart = 0  # rows in a row whose batches hardly agree
        if isinstance(optimizer, NSISA):
            self._outputs.append(self._warn)
        if isinstance(optimizer.peers, Ranks):
            optimizer.peers.agree("every", every)
        if all(group.rank() == 0 for group in measure.others(optimizer)):
            if csv is not None:
                self._outputs.append(rows.Csv(csv).write)
            if tensorboard is not None:
                self._outputs.append(rows.TensorBoard(tensorboard).write)
        if callback is not None:
            self._outputs.append(callback)
        optimizer.observers += (self._observe,)
        begun = optimizer.peers is not None and optimizer.peers.begun
        if self._due and optimizer.synced and not begun:
            with torch.no_grad():
                self._before = self._look()

    @property
    def latest(self) -> Row:
        """The last row, by name; empty before the first."""
        self._deliver(wait=True)
        return dict(self._latest)

    def close(self) -> None:
        """Stop watching, after the last row has been delivered."""
        others = (each for each in self._optimizer.observers if each != self._observe)
        self._optimizer.observers = tuple(others)
        self._before = self._layout = None
        self._deliver(wait=True)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _observe(self) -> None:
        """A round has ended. Called under `no_grad`."""
        before = self._before
        if (before is None and self._sent is None and not self._due) or _capturing():
            return
        self._deliver()
        now = self._before = None
        if before is not None and self._comparable(before):
            now = measure.take(self._optimizer, before.layout)
            self._send(before, now)
        if self._due:
            self._before = now or self._look()

    def _comparable(self, before: measure.Snapshot) -> bool:
        """Whether one round has ended since, no state was loaded, and no parameter is new."""
        optimizer = self._optimizer
        last = (before.iteration, before.life) == (optimizer.iteration - 1, optimizer.life)
        return last and before.layout.fits(optimizer)

    @property
    def _due(self) -> bool:
        """Whether the next round is to be measured."""
        return not (self._optimizer.iteration + 1) % self._every

    def _look(self) -> measure.Snapshot | None:
        if self._layout is None or not self._layout.fits(self._optimizer):
            self._layout = Layout(self._optimizer)
        return measure.take(self._optimizer, self._layout) if any(self._layout.sizes) else None

    def _send(self, before: measure.Snapshot, now: measure.Snapshot) -> None:
        """Send for the numbers of the round that has just ended."""
        self._deliver(wait=True)
        optimizer, layout = self._optimizer, now.layout
        values = measure.measure(optimizer, before, now)
        event = None
        if values.is_cuda:
            arriving = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            arriving.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(values.device))
            values = arriving
        ranks = optimizer.param_groups[0]["ranks"]
        about = About(
            iteration=now.iteration,
            nodes=optimizer.batches * ranks,
            ranks=ranks,
            shards=layout.shards,
            dual_kept=all(section.dual_decay for section in layout.sections),
            sizes=layout.sizes,
        )
        self._sent = _Sent(values, about, event)
        self._deliver()

    def _warn(self, row: Row) -> None:
        """Warn if the batches hardly agree, in two rows in a row; the first time only."""
        optimizer = self._optimizer
        nodes = optimizer.batches * optimizer.param_groups[0]["ranks"]
        if nodes == 1 or not row["dual_norm"] > 0:
            return
        # Of shares that are not equal the true one is smaller, so this errs on the quiet side.
        agreement = (1 - row["spread"] ** 2 - 1 / nodes) / (1 - 1 / nodes)
        self._apart = self._apart + 1 if agreement < _AGREEMENT else 0
        if self._apart == 2:
            self._outputs.remove(self._warn)
            warnings.warn(
                f"the {nodes} batches hardly agree at iteration {row['iteration']:.0f}: the mean "
                f"cosine between their duals is {agreement:.2f}. NSISA settles where "
                "orthogonalised gradients cancel, which is no stationary point of the loss when "
                "batches differ; use MISA or SISA, or shuffle the data",
                UserWarning,
                stacklevel=2,
            )

    def _deliver(self, wait: bool = False) -> None:
        """Hand out a row that has arrived; or that is under way, if `wait`."""
        sent = self._sent
        if sent is None:
            return
        if sent.event is not None:
            if wait:
                sent.event.synchronize()
            elif not sent.event.query():  # type: ignore[no-untyped-call]
                return
        self._sent = None
        self._latest = rows.row(sent.values.tolist(), sent.about)
        for output in tuple(self._outputs):
            output(dict(self._latest))


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, into which nothing of this belongs."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())
