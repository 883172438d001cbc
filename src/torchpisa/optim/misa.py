"""MISA: one learning rate in AdamW's terms, matrices orthogonalised at the consensus. Ours."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import misa, nsisa
from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.kernels import foreach, loop, newton_schulz, sharded
from torchpisa.kernels.foreach import leave_out_nonfinite
from torchpisa.kernels.job import Kernel, Member, check_shapes, compute_dtype, real
from torchpisa.kernels.rounding import store
from torchpisa.optim import arguments, checkpoint, nonfinite, report, traced
from torchpisa.optim.accumulated import AccumulationWatch
from torchpisa.optim.guard import Guard
from torchpisa.optim.param_groups import is_matrix, looks_like_embedding

__all__ = ["MISA"]

Group = dict[str, Any]
State = dict[str, Any]

# Where a round stands: rounds done, slots used (as bits), those of them that were not skipped, and
# whether the weights are to move: a tensor where only the device knows.
PROGRESS: Group = {"iteration": 0, "visited": 0, "present": 0, "moves": False}
# One value for the whole optimizer: a round is a round of all parameters.
SHARED = ("batches", "weights", "clip", "nonfinite")
_LARGE = ("dual", "rows", "moment")
# Settings that are floats, if an integer was given too.
_NAMES = ("lr", "momentum", "weight_decay", "look_ahead", "row_beta", "beta", "eps")
_FLOATS: Group = dict.fromkeys(_NAMES, 0.0)


class MISA(Optimizer):
    r"""Momentum-averaged Inexact Stochastic ADMM: an optimizer to try where AdamW was.

    \[
    \begin{aligned}
    r &= \pi + \textstyle\sum_i \alpha_i g_i, &
    \delta &= -(1 - \mu)\, r, &
    U &= \pi + c\,\delta, \\
    \pi &\leftarrow \pi + \delta, &
    w &\leftarrow (1 - \mathrm{lr}\,\lambda)\, w + \mathrm{lr}\, P(U). &&
    \end{aligned}
    \]

    P orthogonalises a matrix by Newton-Schulz steps and then divides each row by its running root
    mean square. Everything else is divided entry by entry by the running root mean square of r:
    vectors, and what seems to be an embedding or an output layer, by its name (if parameters are
    named) or its shape (1,000 rows or more, and eight times as many as columns). Both have steps as
    large as AdamW's, so one `lr` serves all parameters.

    State is 4 bytes per parameter for matrices (plus one number per row) and 8 for the rest. The
    dual \(\pi\) is shared by all batches, which is exact as long as each of them is in every round.
    For the same reason MISA needs no `process_group`: average gradients over ranks as for AdamW, by
    DistributedDataParallel or FSDP2; every rank then takes the step that one process would take.

    Args:
        params: parameters, named parameters or parameter groups. A group may override everything
            but `batches`, `weights`, `clip` and `nonfinite`, and decide by `matrix=True` or `False`
            whether its matrices are orthogonalised. `torchpisa.optim.param_groups.split(model)`
            makes groups that know the model's embeddings and output layer.
        lr: learning rate, comparable to AdamW's: a number or a tensor.
        momentum: \(\mu\), how much of the average of gradients is kept, in [0, 1).
        weight_decay: \(\lambda\), decoupled from the gradient as in AdamW; not of vectors, such as
            biases and the weights of norms. Steps of matrices do not shrink with their gradients,
            so in long trainings without normalisation layers this is what keeps them in bounds.
        look_ahead: \(c \ge 1\). 2 is the paper's consensus, `1 + momentum` Nesterov momentum.
        row_beta: how much of the rows' mean squares is kept, in [0, 1); None to leave rows as they
            are, which with `look_ahead=1 + momentum` is Muon.
        beta: how much of the second moment of what is not a matrix is kept, in (0, 1).
        eps: added to roots that are divided by.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: what their products are computed in: a dtype, None for that of the state, or
            `"auto"`: bfloat16 on GPUs and, for a million elements or more, on CPUs that have
            instructions for it; never for float64 parameters.
        batches: \(m\), calls of `step()` that make a round; the weights move in the last one.
        weights: \(\alpha_i\), the batches' shares of the data, or their sizes; equal by default.
        clip: largest norm of r over all parameters, batch by batch; None for no clipping.
        nonfinite: what to do with a batch whose gradients are not all finite: `"raise"`, `"skip"`
            (the batch counts as absent) or `"ignore"` (do not look). On a GPU `"raise"` does not
            wait for the device: gradients that are not finite count as zero, and a later call
            raises.
        maximize: maximise instead of minimise.
        foreach: one call per operation for all parameters instead of a loop over them; None
            decides.
        stochastic_rounding: round what is stored in bfloat16 up or down at random, so that the
            error is zero on average.
        capturable: keep counters on the parameters' device, so that a round can be captured in a
            CUDA graph.
        state_dtype: dtype of the state; None is the parameter's own, but float32 for half-precision
            parameters.

    Examples:
        >>> import torch, torchpisa
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        ... )
        >>> opt = torchpisa.MISA(model.parameters(), lr=1e-2)
        >>> x = torch.randn(256, 4)
        >>> for step in range(201):
        ...     loss = (model(x) - x.prod(dim=1, keepdim=True)).square().mean()
        ...     if step % 100 == 0:
        ...         print(f"{loss.item():.1f}")
        ...     opt.zero_grad()
        ...     loss.backward()
        ...     opt.step()
        2.0
        1.0
        0.3
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.1,
        look_ahead: float = 2.0,
        row_beta: float | None = 0.95,
        beta: float = 0.99,
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | Literal["auto"] | None = "auto",
        batches: int = 1,
        weights: Sequence[float] | None = None,
        clip: float | None = None,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        given: Group = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "look_ahead": look_ahead,
            "row_beta": row_beta,
            "beta": beta,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "matrix": None,
            "batches": batches,
            "weights": weights,
            "clip": clip,
            "nonfinite": nonfinite,
            "maximize": maximize,
            "foreach": foreach,
            "stochastic_rounding": stochastic_rounding,
            "capturable": capturable,
            "state_dtype": state_dtype,
        }
        defaults = arguments.in_form(given, _FLOATS)
        check_count("batches", defaults["batches"])
        arguments.check_shared(defaults)
        defaults["weights"] = arguments.shares(defaults["weights"], defaults["batches"])
        _check_group(defaults)
        self._forget()
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = self._takes_infinities

    # Where it stands

    @property
    def batches(self) -> int:
        """The number of batches in a round."""
        return int(self.defaults["batches"])

    @property
    def iteration(self) -> int:
        """Rounds done, that is, how often the weights have moved."""
        return int(self.param_groups[0]["iteration"])

    @property
    def batch(self) -> int:
        """The slot that the next `step()` uses if it is not told one."""
        return self._free_slots()[0]

    @property
    def synced(self) -> bool:
        """Whether no round is open: the last `step()` moved the weights."""
        return not self.param_groups[0]["visited"]

    def memory(self) -> report.Memory:
        """Return the bytes of state: in total, per parameter and by name."""
        return report.memory(self.state, self.param_groups)

    # The step

    @overload
    def step(self, closure: None = None, *, batch: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, batch: int | None = None) -> float: ...

    def step(
        self, closure: Callable[[], float] | None = None, *, batch: int | None = None
    ) -> float | None:
        """Take the gradients of one batch; the last batch of a round also moves the weights.

        Args:
            closure: reevaluates the model and returns the loss.
            batch: slot, from 0, of the batch that the gradients belong to. By default the first
                one that is free in this round.

        Raises:
            ValueError: the slot does not exist or was used in this round, or a gradient is sparse.
            FloatingPointError: a gradient is not finite and `nonfinite="raise"`.
        """
        if closure is None and torch.compiler.is_compiling():
            traced.step(self._params, self._number, batch)
            return None
        return self._step(closure, batch)

    @_disable_dynamo
    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, batch: int | None) -> float | None:
        self._report_nonfinite()
        self._accumulation.look(self._params, self.batches)
        slot = self._claim(batch)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = [
            [member for param in group["params"] if (member := self._member(param, group))]
            for group in self.param_groups
        ]
        for group in self.param_groups:
            _lr(group)  # raises before anything changes, in whichever group it is wrong
        kernels: list[Kernel] = [
            foreach if _uses_foreach(group, own) else loop
            for group, own in zip(self.param_groups, members, strict=True)
        ]
        found_inf = getattr(self, "found_inf", None)
        where = f"batch {slot} of iteration {self.iteration}"
        verdict = nonfinite.verdict(self.param_groups, members, kernels, found_inf, where)
        if verdict.problem is not None:
            raise FloatingPointError(
                f"{verdict.problem}. Nothing was changed; nonfinite='skip' leaves such batches out"
            )
        if verdict.present:
            flags = self._watch.flags(self.param_groups, members, verdict.deferred)
            self._take(slot, members, flags, verdict.keep)
        if any(verdict.deferred):
            self._watch.note(kernels, members, where)
        self._use_up(slot)
        return loss

    @torch.no_grad()
    def skip(self, *, batch: int | None = None) -> None:
        """Use up the slot of a batch that is absent from this round.

        It counts as if its gradient were the average of the past.

        Args:
            batch: slot, from 0. By default the first one that is free in this round.
        """
        self._report_nonfinite()
        self._accumulation.skipped()
        self._use_up(self._claim(batch))

    @torch.no_grad()
    def flush(self) -> None:
        """Close an incomplete round as if all other batches had been skipped."""
        self._report_nonfinite(wait=True)
        if not self.synced:
            self._close()

    def _take(
        self,
        slot: int,
        members: list[list[Member]],
        flags: Sequence[list[Tensor] | None],
        keep: Tensor | None,
    ) -> None:
        """Use the gradients of a batch.

        Args:
            slot: the batch.
            members: parameters with gradients, by group.
            flags: by group, a flag per parameter to raise if its gradient is not finite; None
                where it is known to be.
            keep: whether the batch takes part, where only the device knows.
        """
        scale = getattr(self, "grad_scale", None)
        gradients = [
            [_gradient(member, group, scale) for member in own]
            for group, own in zip(self.param_groups, members, strict=True)
        ]
        for number, own_flags in enumerate(flags):
            if own_flags is not None:
                gradients[number] = leave_out_nonfinite(gradients[number], own_flags)
        clip = self.param_groups[0]["clip"]
        if clip is not None:
            _clip(members, gradients, clip)
        for group, own, grads in zip(self.param_groups, members, gradients, strict=True):
            group["present"] |= 1 << slot
            if self.batches == 1:
                self._move(group, own, grads, keep)
                continue
            for member, grad in zip(own, grads, strict=True):
                self._accumulate(member, grad, group["weights"][slot], keep)
            if keep is None or group["moves"] is True:
                group["moves"] = True
            else:
                group["moves"] = keep | group["moves"]

    def _accumulate(self, member: Member, grad: Tensor, weight: float, keep: Tensor | None) -> None:
        """Add a batch's share of the gradient to the sum of the round."""
        dual = real(member.state["dual"])
        if keep is not None:  # an absent batch counts as if its gradient were the past's average
            grad = torch.where(keep.to(grad.device), grad, -dual.to(grad.dtype))
        state = self.state[member.origin]
        if "pending" not in state:
            # At least float32: the sum over a round must not lose its small terms.
            dtype = torch.promote_types(state["dual"].dtype, torch.float32)
            state["pending"] = torch.zeros_like(state["dual"], dtype=dtype)
        real(member.state["pending"]).add_(grad, alpha=weight)

    def _use_up(self, slot: int) -> None:
        for group in self.param_groups:
            group["visited"] |= 1 << slot
        if not self._free_slots():
            self._close()

    def _close(self) -> None:
        """Move the weights by what the batches of this round have added up, and begin the next."""
        for group in self.param_groups:
            absent = sum(
                weight
                for slot, weight in enumerate(group["weights"])
                if not group["present"] >> slot & 1
            )
            reached = [
                sharded.part(Member(param, None, self.state[param]))
                for param in group["params"]
                if "pending" in self.state.get(param, ())
            ]
            sums = []
            for member in reached:
                dual = real(member.state["dual"])
                total = real(member.state["pending"]).to(compute_dtype(real(member.param), dual))
                sums.append(total.sub_(dual, alpha=absent) if absent else total)
                del member.state["pending"]
            keep = group["moves"] if isinstance(group["moves"], Tensor) else None
            if reached:
                self._move(group, reached, sums, keep)
            group.update({**PROGRESS, "iteration": group["iteration"] + 1})
        self._guard.look(self.iteration, self._params, "lower lr")

    def _move(
        self, group: Group, members: list[Member], grads: list[Tensor], keep: Tensor | None
    ) -> None:
        """Take the consensus for some parameters of a group.

        Args:
            group: the group.
            members: the parameters.
            grads: their gradients, added up over the batches, in the dtype to compute in.
            keep: nothing changes if this is False; None for True.
        """
        step = _foreach_step if keep is None and _uses_foreach(group, members) else _loop_step
        for matrix, pairs in _kinds(group, members, grads):
            step(group, matrix, [member for member, _ in pairs], [grad for _, grad in pairs], keep)

    # Groups and state

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; it joins the round where that stands."""
        legal = {*self.defaults, *arguments.FOREIGN_KEYS}
        arguments.reject_unknown(param_group, legal, "a parameter group")
        first = self.param_groups[0] if self.param_groups else {**self.defaults, **PROGRESS}
        for name in SHARED:
            if param_group.get(name, first[name]) != first[name]:
                raise ValueError(
                    f"{name} must be the same for all parameter groups ({first[name]!r}), "
                    f"got {param_group[name]!r}"
                )
        inherited = {name: first[name] for name in (*SHARED, *PROGRESS)}
        group = {**self.defaults, **arguments.in_form(param_group, _FLOATS), **inherited}
        _check_group(group)
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            _check_params(added)
        except Exception:
            self.param_groups.pop()
            raise
        for param_name, param in _named(added):
            if param.requires_grad:
                self.state[param] = _fresh_state(param, added, param_name)
        self._params += added["params"]

    def _member(self, param: Tensor, group: Group) -> "Member | None":
        """Return the parameter with its gradient and state, or None if it has no gradient."""
        grad = param.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, got {grad.layout} for a parameter of shape "
                f"{tuple(param.shape)}; give nn.Embedding sparse=False"
            )
        state = self.state.get(param)
        if not state:
            state = self.state[param] = _fresh_state(param, group, _name_of(param, group))
        if state["dual"].get_device() != param.get_device():
            for key, value in state.items():
                if key != "step" or group["capturable"]:
                    state[key] = value.to(param.device)
        check_shapes([Member(param, grad, state)], ("dual", "moment", "pending"))
        return sharded.part(Member(param, grad, state))

    def _forget(self) -> None:
        """Start afresh with what belongs to this object and is never saved."""
        self._params = [p for group in getattr(self, "param_groups", ()) for p in group["params"]]
        self._number = traced.register(self)
        self._watch = nonfinite.Watch()
        self._guard = Guard()
        self._accumulation = AccumulationWatch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._step_supports_amp_scaling = self._takes_infinities

    @property
    def _takes_infinities(self) -> bool:
        """Whether GradScaler calls step() even when it found infinities.

        A batch that is skipped then uses up its slot. Not with one batch: trainers refuse to clip
        gradients for optimizers that unscale them.
        """
        return self.batches > 1 or bool(self.defaults["capturable"])

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict; it may be taken in the middle of a round."""
        return checkpoint.packed(super().state_dict())

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a MISA with the same number of batches.

        Hooks see it first; then every entry of it is checked, and if one does not fit, nothing has
        changed. Tensors keep the dtype that they were saved with, counters are float32.

        Raises:
            ValueError: an entry, which the message names, does not fit.
        """
        names: dict[int, dict[int, str | None]] = {}  # by group; looked up once for all of it

        def fresh_state(param: Tensor, group: Group, _: int) -> State:
            if id(group) not in names:
                names[id(group)] = {id(other): name for name, other in _named(group)}
            return _fresh_state(param, group, names[id(group)][id(param)])

        checkpoint.load(self, state_dict, _check_loaded, fresh_state)

    def _report_nonfinite(self, wait: bool = False) -> None:
        self._watch.report(lambda params: nonfinite.named(params, self.param_groups), wait)

    def _free_slots(self) -> list[int]:
        visited = self.param_groups[0]["visited"]
        return [slot for slot in range(self.batches) if not visited >> slot & 1]

    def _claim(self, batch: int | None) -> int:
        if batch is None:
            return self.batch
        check_count("batch", batch, 0)
        if batch not in self._free_slots():
            problem = "was used in this round" if batch < self.batches else "does not exist"
            raise ValueError(
                f"batch must be one of the free slots {self._free_slots()}, got {batch}, "
                f"which {problem} (batches={self.batches})"
            )
        return batch


# What the consensus does with some parameters of one group, all matrices or none of them:
# `_loop_step` is the specification, `_foreach_step` the same with one call per operation.


def _loop_step(
    group: Group, matrix: bool, members: list[Member], grads: list[Tensor], keep: Tensor | None
) -> None:
    for member, grad in zip(members, grads, strict=True):
        own = keep if keep is None else keep.to(grad.device)
        stored = {key: real(member.state[key]) for key in _LARGE if key in member.state}
        state = {key: value.to(grad.dtype) for key, value in stored.items()}
        step = _count(member, own)
        r = state["dual"] + grad
        delta = misa.average(r, group["momentum"])
        u = misa.look_ahead(state["dual"], delta, group["look_ahead"])
        new = {"dual": state["dual"] + delta}
        if not matrix:
            p, new["moment"] = misa.scale_entries(
                u, r, state["moment"], step, group["beta"], group["eps"]
            )
        else:
            (o,) = _orthogonalized(group, [member], [u])
            if group["row_beta"] is None:
                p = misa.match_rms(o, *_shape(member))
            else:
                rows, settings = state["rows"].flatten(1), (group["row_beta"], group["eps"])
                p, rows = misa.normalize_rows(o, _row_squares(o, member), rows, step, *settings)
                new["rows"] = rows.view_as(state["rows"])
            p = p.view_as(u)
        w = real(member.param)
        new["param"] = misa.move(w.to(grad.dtype), p, _lr(group), _decay(group, member))
        stored["param"], state["param"] = w, w.to(grad.dtype)
        for key, value in new.items():
            chosen = value if own is None else torch.where(own, value, state[key])
            store(stored[key], chosen, group["stochastic_rounding"])


def _foreach_step(
    group: Group, matrix: bool, members: list[Member], grads: list[Tensor], keep: Tensor | None
) -> None:
    mu, lr, dtype = group["momentum"], _lr(group), grads[0].dtype
    steps = [_count(member, None) for member in members]
    duals = [real(member.state["dual"]) for member in members]
    work = _as(duals, dtype)
    rs = list(torch._foreach_add(work, grads))
    us = list(torch._foreach_add(work, rs, alpha=group["look_ahead"] * (mu - 1)))
    torch._foreach_add_(work, rs, alpha=mu - 1)
    _write_back(duals, work, group)
    if not matrix:
        beta = group["beta"]
        moments = [real(member.state["moment"]) for member in members]
        work = _as(moments, dtype)
        torch._foreach_mul_(work, beta)
        torch._foreach_addcmul_(work, rs, rs, 1 - beta)
        _write_back(moments, work, group)
        roots = torch._foreach_sqrt(work)
        torch._foreach_div_(roots, [(1 - beta**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(us, roots)
        scales: list[float] | float = 1.0
    elif group["row_beta"] is None:
        os = _orthogonalized(group, members, us)
        us = [o.view_as(u) for o, u in zip(os, us, strict=True)]
        scales = [misa.RMS * max(_shape(member)) ** 0.5 for member in members]
    else:
        beta = group["row_beta"]
        os = _orthogonalized(group, members, us)
        rows = [real(member.state["rows"]) for member in members]
        work = _as(rows, dtype)
        squares = [
            _row_squares(o, member).view_as(row)
            for o, member, row in zip(os, members, rows, strict=True)
        ]
        torch._foreach_mul_(work, beta)
        torch._foreach_add_(work, squares, alpha=1 - beta)
        _write_back(rows, work, group)
        roots = torch._foreach_sqrt(work)
        torch._foreach_div_(roots, [(1 - beta**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        us = [o.view_as(u) for o, u in zip(os, us, strict=True)]
        torch._foreach_div_(us, roots)
        scales = misa.RMS
    params = [real(member.param) for member in members]
    ws = _as(params, dtype)
    decay = _decay(group, members[0])
    if decay:
        torch._foreach_mul_(ws, 1 - lr * decay)
    if isinstance(scales, list):
        torch._foreach_mul_(us, scales)
        scales = 1.0
    if isinstance(lr, Tensor):
        torch._foreach_mul_(us, lr * scales)
        torch._foreach_add_(ws, us)
    else:
        torch._foreach_add_(ws, us, alpha=lr * scales)
    _write_back(params, ws, group)


def _orthogonalized(group: Group, members: list[Member], us: Sequence[Tensor]) -> list[Tensor]:
    """Return U V^T for each matrix U S V^T, as matrices; of sharded ones, the rows held here."""
    dtype = group["ns_dtype"]
    if isinstance(dtype, str):
        dtype = newton_schulz.fast_dtype([member.origin for member in members])

    def solve(matrices: Sequence[Tensor]) -> list[Tensor]:
        if group["foreach"] is False:
            return [nsisa.newton_schulz(each, group["ns_steps"], dtype) for each in matrices]
        return newton_schulz.orthogonalize(matrices, group["ns_steps"], dtype)

    wholes = [member.whole for member in members if member.whole is not None]
    if wholes:
        return [o.flatten(1) for o in sharded.solve(us, wholes, solve)]
    return solve([u.flatten(1) for u in us])


def _row_squares(o: Tensor, member: Member) -> Tensor:
    """Return the mean square of each row, (rows, 1), also where columns are elsewhere."""
    squares: Tensor = torch.linalg.vector_norm(o, dim=1, keepdim=True).square()
    if member.whole is not None:
        squares = sharded.summed(squares, sharded.groups_of_columns(member.whole))
    return squares / _shape(member)[1]


def _kinds(
    group: Group, members: list[Member], grads: list[Tensor]
) -> Iterator[tuple[bool, list[tuple[Member, Tensor]]]]:
    """Yield members that share rule, decay, device and dtypes, with their gradients."""
    kinds: dict[Any, list[tuple[Member, Tensor]]] = {}
    for member, grad in zip(members, grads, strict=True):
        matrix = "moment" not in member.state
        dtypes = member.param.dtype, member.state["dual"].dtype, grad.dtype
        decays = member.origin.dim() > 1
        kind = matrix, decays, member.param.device, dtypes, member.whole is None
        kinds.setdefault(kind, []).append((member, grad))
    for (matrix, *_), pairs in kinds.items():
        yield matrix, pairs


def _uses_foreach(group: Group, members: list[Member]) -> bool:
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return all(type(real(member.param)) in (Tensor, nn.Parameter) for member in members)


# Single parameters


def _gradient(member: Member, group: Group, scale: Tensor | None) -> Tensor:
    """Return the gradient in the dtype to compute in; never to be written to."""
    assert member.grad is not None
    dtype = compute_dtype(real(member.param), real(member.state["dual"]))
    grad: Tensor = real(member.grad).to(dtype)
    if scale is not None:
        grad = grad / scale.to(grad.device)
    return -grad if group["maximize"] else grad


def _clip(members: list[list[Member]], gradients: list[list[Tensor]], clip: float) -> None:
    """Replace gradients so that the norm of r = pi + g, over all of them, is at most `clip`."""
    squares, wholes = [], []
    for own, grads in zip(members, gradients, strict=True):
        for member, grad in zip(own, grads, strict=True):
            r = real(member.state["dual"]).to(grad.dtype) + grad
            squares.append(torch.linalg.vector_norm(r).double().square())
            wholes += [] if member.whole is None else [member.whole]
    if not squares:
        return
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum()
    norm = sharded.summed(total, sharded.groups(wholes)).sqrt()
    factor = (clip / norm).clamp(max=1)
    for own, grads in zip(members, gradients, strict=True):
        for i, (member, grad) in enumerate(zip(own, grads, strict=True)):
            s = factor.to(grad.device, grad.dtype)
            # pi + this is s (pi + g).
            grads[i] = s * grad + (s - 1) * real(member.state["dual"]).to(grad.dtype)


def _count(member: Member, keep: Tensor | None) -> Scalar:
    """Count the step and return how many there were."""
    step: Tensor = member.state["step"]
    if keep is None:
        step.add_(1)
        return step.item() if step.device.type == "cpu" else step
    if step.device != keep.device:
        step = member.state["step"] = step.to(keep.device)
    # One that has been skipped from the start has nothing to correct for.
    return step.add_(keep).clamp(min=1)


def _shape(member: Member) -> tuple[int, int]:
    """Return rows and columns of the whole matrix."""
    whole = member.origin
    return whole.size(0), whole.numel() // whole.size(0)


def _fresh_state(param: Tensor, group: Group, name: str | None) -> State:
    """Return the state of a parameter before its first step."""
    dtype = param.dtype
    if not dtype.is_complex:
        dtype = group["state_dtype"] or torch.promote_types(dtype, torch.float32)
    state: State = {"dual": torch.zeros_like(param, dtype=dtype, requires_grad=False)}
    if not _is_orthogonalized(param, group, name):
        state["moment"] = torch.zeros_like(state["dual"])
    elif group["row_beta"] is not None:
        # (rows, 1, ...), so that it is sharded with the rows of its parameter.
        narrow = (slice(None), *[slice(1)] * (param.dim() - 1))
        state["rows"] = state["dual"][narrow].clone()
    device = param.device if group["capturable"] else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    return state


def _name_of(param: Tensor, group: Group) -> str | None:
    return next(name for name, other in _named(group) if other is param)


def _named(group: Group) -> Iterator[tuple[str | None, Tensor]]:
    """Return the parameters of a group with their names, None for those without."""
    names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
    return zip(names, group["params"], strict=True)


def _is_orthogonalized(param: Tensor, group: Group, name: str | None) -> bool:
    if group["matrix"] is not None or not is_matrix(param):
        return bool(group["matrix"]) and is_matrix(param)
    single = param.size(0) == 1 or param.numel() == param.size(0)
    return not single and not looks_like_embedding(name, param)


def _decay(group: Group, member: Member) -> float:
    return float(group["weight_decay"]) if member.origin.dim() > 1 else 0.0


def _lr(group: Group) -> Scalar:
    """Return the learning rate, without the dimension that some schedulers' tensors have."""
    lr: Scalar = group["lr"]
    if isinstance(lr, Tensor):
        return lr.reshape(())
    check_range("lr", lr, 0, high_open=True)
    return lr


def _as(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _write_back(stored: list[Tensor], computed: list[Tensor], group: Group) -> None:
    if stored is computed:
        return
    for target, value in zip(stored, computed, strict=True):
        store(target, value, group["stochastic_rounding"])


def _check_group(group: Group) -> None:
    check_range("lr", group["lr"], 0, high_open=True)
    check_range("momentum", group["momentum"], 0, 1, high_open=True)
    check_range("weight_decay", group["weight_decay"], 0, high_open=True)
    check_range("look_ahead", group["look_ahead"], 1, high_open=True)
    if group["row_beta"] is not None:
        check_range("row_beta", group["row_beta"], 0, 1, high_open=True)
    check_range("beta", group["beta"], 0, 1, low_open=True, high_open=True)
    check_range("eps", group["eps"], 0, high_open=True)
    check_count("ns_steps", group["ns_steps"], high=100)
    arguments.check_ns_dtype(group["ns_dtype"])
    for flag in ("maximize", "capturable", "stochastic_rounding"):
        check_choice(flag, group[flag], (True, False))
    for flag in ("foreach", "matrix"):
        check_choice(flag, group[flag], (None, True, False))
    arguments.check_dtype("state_dtype", group["state_dtype"])


def _check_loaded(group: Group) -> None:
    arguments.check_shared(group)
    _check_group(group)
    _check_params(group)


def _check_params(group: Group) -> None:
    for param in group["params"]:
        if not (param.is_floating_point() or param.is_complex()):
            raise ValueError(f"params must be floating point or complex, got {param.dtype}")
        if group["matrix"] and not is_matrix(param):
            raise ValueError(
                "matrix must be None or False for parameters that are not real matrices, "
                f"got True for one of shape {tuple(param.shape)}"
            )
