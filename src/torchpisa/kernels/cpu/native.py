"""The kernel in C for CPUs: the local step in one pass over memory, for `fused=True` only.

`native.c` is compiled for the processor at hand when a process makes its first such optimizer. This
takes a fraction of a second and leaves no file.
"""

import ctypes
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchpisa.kernels.foreach import FOREACH
from torchpisa.kernels.job import Consensus, Kernel, LocalJob, Member, mark_changed
from torchpisa.preconditioners import Identity, Preconditioner, SecondMoment
from torchpisa.state_keys import slot_keys

__all__ = ["NATIVE", "Native", "obstacle"]

# Elements below which threads cost more than they save.
_MIN_FOR_THREADS = 2**20

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")


# `Row` in native.c: five addresses, the size, the correction, and whether the sum is fresh.
_ROW = "qqqqqqfi"


class _Numbers(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in (
                "ratio",
                "scale",
                "grad_factor",
                "weight_decay",
                "clip",
                "keep",
                "add",
                "eta",
                "eps",
                "dual_decay",
                "consensus_decay",
            )
        ),
        ("moves", ctypes.c_int32),
    )


def obstacle(params: Sequence[Tensor], preconditioner: Preconditioner) -> str | None:
    """Return the reason why this kernel cannot step the parameters, or None; may compile it."""
    if type(preconditioner) not in (SecondMoment, Identity):
        return f"on a CPU there is no fused kernel for {type(preconditioner).__name__}"
    for param in params:
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(param).__name__}, not a plain tensor"
        if param.dtype != torch.float32:
            return f"on a CPU parameters must be float32, got {param.dtype}"
    if _library() is None:
        return "no C compiler was found (set CC), or it failed"
    return None


class Native:
    """The kernel for SISA's rule and Identity in float32 on a CPU; see `Kernel`."""

    finds_nonfinite: ClassVar[bool] = False
    takes_flags: ClassVar[bool] = False
    slower: ClassVar[Kernel | None] = FOREACH

    def supports(self, job: LocalJob) -> bool:
        """Return whether sigma is given and all numbers of a job are on the host."""
        if job.keep is not None or job.sigma is None:
            return False
        return not any(isinstance(number, Tensor) for number in (job.sigma, job.rho))

    @torch.no_grad()
    def local_step(self, job: LocalJob) -> None:
        """Take the local step; `foreach` steps members without a contiguous gradient."""
        names = _Names.of(job)
        supported: list[Member] = []
        others: list[Member] = []
        for member in job.members:
            (supported if _is_supported(member, names) else others).append(member)
        if others:
            FOREACH.local_step(replace(job, members=others))
        if not supported:
            return
        torch._foreach_add_([member.state[names.step] for member in supported], 1)
        rows = struct.pack(_ROW * len(supported), *_rows(job, supported, names))
        numbers = _numbers(job)
        step = _library()
        assert step is not None
        elements = sum(member.param.numel() for member in supported)
        threads = torch.get_num_threads() if elements >= _MIN_FOR_THREADS else 1
        step(rows, len(supported), ctypes.byref(numbers), threads)
        if job.consensus is not None:
            mark_changed([member.param for member in supported])
        else:
            for member in supported:
                member.state["arrived"] |= 1 << job.slot

    def residual_norm(self, job: LocalJob) -> list[Tensor]:
        """Return norms of r, by `foreach`."""
        return FOREACH.residual_norm(job)

    def take_consensus(
        self, members: list[Member], consensus: Consensus, keep: Tensor | None
    ) -> None:
        """Take the consensus, by `foreach`."""
        FOREACH.take_consensus(members, consensus, keep)


NATIVE = Native()


class _Names(NamedTuple):
    """The keys of the state that a job uses; None for keys that it does not use."""

    dual: str
    step: str
    moment: str | None
    pending: str | None

    @classmethod
    def of(cls, job: LocalJob) -> "_Names":
        keys = slot_keys(job.slot)
        moment = keys.moment if isinstance(job.preconditioner, SecondMoment) else None
        return cls(keys.dual, keys.step, moment, "pending" if job.consensus is None else None)


def _is_supported(member: Member, names: _Names) -> bool:
    param, grad, state, _ = member
    if grad is None or type(param) not in (Tensor, torch.nn.Parameter):
        return False
    tensors = [param, grad, state[names.dual]]
    if names.moment is not None:
        tensors.append(state[names.moment])
    if names.pending is not None:
        tensors.append(state[names.pending])
    shape = param.shape
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or not tensor.is_cpu:
            return False
        if tensor.shape != shape:  # `foreach` raises the error
            return False
    return True


def _rows(job: LocalJob, members: Sequence[Member], names: _Names) -> Iterator[float]:
    """Yield the fields of all rows, one by one, to create few Python objects."""
    dual, step, moment, pending = names
    rule = job.preconditioner
    beta = rule.beta if isinstance(rule, SecondMoment) and rule.scheme == "adam" else None
    for param, grad, state, _ in members:
        assert grad is not None
        yield param.data_ptr()
        yield state[dual].data_ptr()
        yield 0 if moment is None else state[moment].data_ptr()
        yield 0 if pending is None else state[pending].data_ptr()
        yield grad.data_ptr()
        yield param.numel()
        yield 1.0 if beta is None else (1 - beta ** state[step].item()) ** -0.5
        yield not state["arrived"]


def _numbers(job: LocalJob) -> _Numbers:
    rule = job.preconditioner if isinstance(job.preconditioner, SecondMoment) else SecondMoment()
    scale, consensus_decay = job.weight, 0.0
    if job.consensus is not None:
        consensus_decay = job.consensus.consensus_decay
        scale = float(job.consensus.scale())
    sums = rule.scheme == "adagrad"
    return _Numbers(
        ratio=float(job.rho / job.penalty),
        scale=scale,
        grad_factor=(-1.0 if job.maximize else 1.0)
        / (1.0 if job.grad_scale is None else job.grad_scale.item()),
        weight_decay=job.weight_decay,
        clip=1.0 if job.clip_scale is None else job.clip_scale.item(),
        keep=1.0 if sums else rule.beta,
        add=1.0 if sums else 1 - rule.beta,
        eta=rule.eta,
        eps=rule.eps,
        dual_decay=job.dual_decay,
        consensus_decay=consensus_decay,
        moves=job.consensus is not None,
    )


@cache
def _library() -> Callable[..., None] | None:
    """Return the compiled function, or None if there is no compiler or it fails."""
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
    except ValueError:  # an unclosed quotation mark
        return None
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    # Link torch's own OpenMP or none: two runtimes would compete for the processor, or crash.
    openmp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]
    flags = [*_FLAGS, "-fopenmp"] if openmp else _FLAGS
    with (
        tempfile.TemporaryDirectory(prefix="torchpisa_") as folder,
        resources.as_file(resources.files("torchpisa.kernels.cpu") / "native.c") as source,
    ):
        compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
        try:
            for arguments in (
                [*flags, "-c", source, "-o", compiled],
                ["-shared", compiled, "-o", linked, *openmp, "-lm"],
            ):
                command = [*compiler, *map(str, arguments)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
            step: Callable[..., None] = ctypes.CDLL(str(linked)).torchpisa_local_step
        except (subprocess.SubprocessError, OSError, AttributeError):
            return None
    step.argtypes = [  # type: ignore[attr-defined]
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    step.restype = None  # type: ignore[attr-defined]
    return step
