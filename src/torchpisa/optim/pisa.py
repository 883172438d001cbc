"""PISA, Algorithm 1, as a torch optimizer. SISA and NSISA are PISA with a rule of their own."""

from collections.abc import Callable, Hashable, Sequence
from operator import is_not
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import pisa
from torchpisa.checks import check_count
from torchpisa.kernels import dispatch
from torchpisa.kernels.job import Member, real
from torchpisa.optim import arguments, nonfinite, report
from torchpisa.optim.optimizer import RoundOptimizer, Undo
from torchpisa.optim.peers import DeviceMesh, Peers, ProcessGroup
from torchpisa.optim.round import (
    Group,
    Part,
    Rule,
    clip_scale,
    consensus,
    contribute_duals,
    contribute_missing,
    finish,
    local_job,
)
from torchpisa.penalty import Gamma
from torchpisa.preconditioners import Identity, Preconditioner
from torchpisa.preconditioners.base import initial_state
from torchpisa.state_keys import state_key

__all__ = ["PISA"]


def _given(group: Group, params: Sequence[Tensor]) -> Preconditioner:
    chosen: Preconditioner = group["preconditioner"]
    return chosen


class PISA(RoundOptimizer):
    r"""Preconditioned Inexact Stochastic ADMM (Algorithm 1) with a preconditioner of your choice.

    \[
    \begin{aligned}
    d_i &= -(\sigma_i I + \rho_i Q_i)^{-1} (\pi_i + g_i), &
    u_i &= \pi_i + 2 \sigma_i d_i, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, &
    w &\leftarrow w + \frac{\sum_i \alpha_i u_i - \lambda w}{\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        preconditioner: \(Q_i\), a `torchpisa.preconditioners.Preconditioner`; by default
            `Identity()`.
        lr: relative learning rate, a number or a tensor: it divides sigma and rho.
        sigma: \(\sigma_i^0 > 0\), the penalty: 1/sigma is the step that a constant gradient ends
            up with. One number, or one per batch.
        rho: \(\rho_i \ge 0\), the weight of the preconditioner. One number, or one per batch.
        gamma: \(\gamma_i\) of equation (2.12), in (0, 1]: sigma is divided by it in every round.
            A number, a function of the iteration (see `torchpisa.penalty`), or one of either per
            batch.
        batches: \(m\), the number of batches that make a round. `step()` is called once for each
            of them; the weights move in the last call.
        weights: \(\alpha_i\), the batches' shares of the data, or their sizes; equal by default.
            Constant in time. With a `process_group`, those of this rank's batches, which are
            compared with all ranks'.
        weight_decay: \(\mu - \lambda\), L2 term in every batch's gradient.
        consensus_decay: \(\lambda\), L2 term at the consensus.
        clip: largest norm of \(\pi_i + g_i\) over all parameters; None for no clipping. Unlike
            clipping gradients it does not move the solution.
        dual_decay: factor in [0, 1] on every new dual. Below 1 it forgets, and with unequal
            batches the solution moves.
        initial_consensus: take the paper's very first consensus, \(w^0 S/(S + \lambda)\), when the
            parameters are given to the optimizer. Not when resuming.
        nonfinite: what to do with a batch whose gradients are not all finite: `"raise"`, `"skip"`
            (the batch counts as absent) or `"ignore"` (do not look). `"raise"` changes nothing,
            except on a GPU. Not to wait for the device, a step there leaves out what is not finite
            and steps the rest, and a later `step()` raises: fused kernels leave out single entries,
            `foreach` the whole gradient of a parameter, which counts as zero.
        maximize: maximise instead of minimise.
        foreach: one call per operation for all parameters instead of a loop over them; None
            decides.
        fused: one pass over memory: on a GPU one launch of a Triton kernel for all parameters of a
            group; on a CPU, for SISA's rule and `Identity` in float32, a C function for which the
            compiler at hand is called once, now. True raises ValueError, with the reason, where
            that cannot be done. None uses Triton where it can, unless `foreach` is given, and
            never calls a compiler.
        stochastic_rounding: round what is stored in bfloat16, parameters and state, up or down at
            random so that the error is zero on average: for training in bfloat16 without a
            float32 copy of the weights.
        capturable: keep everything that changes in tensors on the parameters' device, so that
            whole rounds can be captured in a CUDA graph.
        state_dtype: dtype of duals and other state; None is the parameter's own, but float32 for
            half-precision parameters. Complex parameters keep theirs.
        process_group: a `torch.distributed` process group, or a mesh of one dimension, whose ranks
            are the nodes: each holds `batches` of them, with their duals, and the consensus is one
            sum over all ranks. Gradients must be those of the rank's own data; see
            `torchpisa.distributed.attach` for DistributedDataParallel and
            `torchpisa.distributed.shard` for FSDP. When parameters are added, all ranks take those
            of the first. None is this process alone.
        reduce_dtype: what crosses the network, such as `torch.bfloat16` for half of the bytes;
            weights are never rounded to it. None is the dtype of the state.

    Examples:
        >>> import torch, torchpisa
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = torchpisa.PISA([w], sigma=1.0, rho=4.0)
        >>> for _ in range(100):
        ...     opt.zero_grad()
        ...     (0.5 * (w - 1) ** 2).sum().backward()
        ...     opt.step()
        >>> round(w.item(), 4)
        1.0
    """

    shared = ("batches", "ranks", "weights", "clip", "nonfinite")
    _dual_key = state_key("dual", 0)
    _rules: ClassVar[tuple[Rule, ...]] = (Rule((), _given),)

    # The other ranks; a load leaves them alone, and copies have none.
    peers: Peers | None = None

    def __init__(
        self,
        params: ParamsT,
        preconditioner: Preconditioner | None = None,
        *,
        lr: float | Tensor = 1.0,
        sigma: float | Sequence[float] = 1.0,
        rho: float | Sequence[float] = 10.0,
        gamma: Gamma | Sequence[Gamma] = 1.0,
        batches: int = 1,
        weights: Sequence[float] | None = None,
        weight_decay: float = 0.0,
        consensus_decay: float = 0.0,
        clip: float | None = None,
        dual_decay: float = 1.0,
        initial_consensus: bool = False,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        settings = arguments.of_constructor(locals())
        settings["preconditioner"] = preconditioner or Identity()
        self._start(params, settings)

    def _start(self, params: ParamsT, settings: Group) -> None:
        """Make the optimizer from all arguments of a constructor."""
        arguments.refuse_foreign(settings, type(self).__name__)
        settings = arguments.in_form(settings, arguments.FLOATS)
        check_count("batches", settings["batches"])
        arguments.check_shared(settings)
        arguments.check_dtype("reduce_dtype", settings["reduce_dtype"])
        # Neither can be part of a group: a process group cannot be saved.
        process_group, reduce_dtype = settings.pop("process_group"), settings.pop("reduce_dtype")
        if process_group is not None:
            from torchpisa.distributed.process_group import join

            self.peers = join(process_group, reduce_dtype)
        shares = arguments.shares if self.peers is None else self.peers.shares
        settings["ranks"] = 1 if self.peers is None else self.peers.size
        settings["weights"] = shares(settings["weights"], settings["batches"])
        self._check_group(settings)
        arguments.warn_about_absolute_lr(settings, type(self).__name__)
        super().__init__(params, settings)

    def start_afresh(self) -> None:
        """Drop what belongs to this object and these tensors, and is never saved."""
        super().start_afresh()
        self._plans: dispatch.Plans = {}
        self._parts: list[Part] = []
        self._parts_for: list[Group] = []
        self._problem: str | None = None
        if self.peers is not None:
            self.peers.forget()

    @property
    def _takes_infinities(self) -> bool:
        # Other ranks wait for this one, whatever it found.
        return self.peers is not None or super()._takes_infinities

    # Rules

    def parts(self) -> list[Part]:
        """Return the parameters by group and rule, with that rule's numbers."""
        groups = self.param_groups
        if len(groups) != len(self._parts_for) or any(map(is_not, groups, self._parts_for)):
            self._parts_for = list(groups)
            self._parts = [
                part
                for number, group in enumerate(groups)
                for part in self._parts_of(number, group)
            ]
        return self._parts

    def _parts_of(self, number: int, group: Group) -> list[Part]:
        """Return the parameters of a group by rule."""
        return [Part(number, group, group["params"], self._rules[0])]

    def _part_of(self, param: Tensor, group: Group) -> Part:
        """Return one parameter and its rule."""
        (part,) = self._parts_of(0, {**group, "params": [param]})
        return part

    def effective(self) -> list[report.Effective]:
        """Return step size and momentum as other optimizers count them, by group and rule."""
        return [report.effective(part, self.state) for part in self.parts()]

    # The step

    def _take(self, slot: int, members: list[list[Member]]) -> None:
        took = 1 << slot if self.peers is not None else 0  # while the backward pass was running
        reached = []
        for of_part in members:
            reached.append(
                [m for m in of_part if m.grad is not None and not m.state["arrived"] & took]
            )
        if any(reached) or self.peers is None or not self.peers.begun:
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            self._local_step(slot, reached, "step", scale, found_inf)

    def _local_step(
        self,
        slot: int,
        reached: list[list[Member]],
        key: Hashable,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> bool:
        """Take the local step of a batch over members with gradients, by part.

        Args:
            slot: the batch.
            reached: the members; all of the batch, or some that `key` names.
            key: by which kernels find again what they have prepared for the same members.
            grad_scale: what the gradients were multiplied by.
            found_inf: whether a GradScaler found infinities in them.

        Returns:
            False if the batch was left out.
        """
        parts = self.parts()
        kernels = []
        for number, (part, of_part) in enumerate(zip(parts, reached, strict=True)):
            preconditioner, follows = part.preconditioner, part.group[part.rule.sigma] is None
            if of_part and type(preconditioner).check is not Preconditioner.check:
                preconditioner.check([member.origin for member in of_part])
            kernels.append(
                dispatch.for_local_step(
                    part.group, of_part, preconditioner, slot, follows, (number, key), self._plans
                )
            )
        where = f"batch {slot} of iteration {self.round.iteration}"
        verdict = nonfinite.verdict(self.param_groups, reached, kernels, found_inf, where)
        if verdict.problem is not None:
            if self.peers is None:
                raise FloatingPointError(
                    f"{verdict.problem}. Nothing was changed; nonfinite='skip' leaves such "
                    "batches out"
                )
            # The other ranks are waiting for this one, so it joins them, and raises afterwards.
            self._problem = verdict.problem
        self._open()
        if not verdict.present:
            return False
        at_once = self._moves_at_once
        flags: Sequence[list[Tensor] | None] = [None] * len(parts)
        if any(verdict.deferred):
            flags = self._watch.flags([part.params for part in parts], reached, verdict.deferred)
        jobs = []
        for part, of_part, flagged in zip(parts, reached, flags, strict=True):
            job = local_job(part, of_part, slot, verdict.keep, at_once)
            job.grad_scale, job.search, job.flags = grad_scale, verdict.search, flagged
            jobs.append(job)
        clip = self.param_groups[0]["clip"]
        if clip is not None:
            scale = clip_scale(jobs, kernels, clip)
            for job in jobs:
                job.clip_scale = scale
        for job, kernel in zip(jobs, kernels, strict=True):
            if job.members:
                dispatch.able(kernel, job).local_step(job)
        if verdict.search or any(verdict.deferred):
            self._watch.note(kernels, reached, where)
        self.round.note(slot, self.batches, None if at_once else verdict.keep)
        return True

    @property
    def _moves_at_once(self) -> bool:
        """True if a round is a single batch, whose step moves the weights at once."""
        return self.peers is None and self.batches == 1

    def _open(self) -> None:
        if self.round.used or (self.peers is not None and self.peers.begun):
            return
        # All rules are asked before anything changes: one may raise.
        grown = []
        for part in self.parts():
            if part.group["gamma"] != 1.0 and not part.follows:
                grown.append((part, part.next_sigmas(self.round.iteration)))
        for part, new in grown:
            if part.group["capturable"]:
                for sigma, value in zip(part.sigmas, new, strict=True):
                    sigma.copy_(value)
            else:
                part.group[part.rule.sigma] = new

    def _use_up(self, slot: int, members: list[list[Member]]) -> bool:
        if self.peers is not None:
            self.peers.stepped()
        return super()._use_up(slot, members)

    def _close(self, members: list[list[Member]]) -> None:
        if (
            self.peers is not None or self._moves_at_once
        ):  # see `_end_round`; the step has moved them
            return
        keep = self.round.keep()
        for part, of_part in zip(self.parts(), members, strict=True):
            reached = [member for member in of_part if member.state["arrived"]]
            contribute_missing(part, reached, self.round)
            consensus(part, reached, part.totals(reached), keep, self._plans)
            finish(reached)

    def _end_round(self, members: list[list[Member]]) -> None:
        problem, self._problem = self._problem, None
        problems = 0
        if self.peers is not None:
            problems = self.peers.close(
                self.parts(), members, self.round, problem is not None, self._plans
            )
        # Before anything is raised: some ranks may raise and others not, and all must observe.
        super()._end_round(members)
        if self.peers is not None:
            self.peers.raise_if_out_of_step()
        if problems:
            where = f"iteration {self.iteration - 1}"
            raise FloatingPointError(
                f"{problem or f'non-finite gradient on another rank in {where}'}. The batch was "
                "left out, its dual was contributed, and all ranks have completed the round; "
                "nonfinite='skip' goes on without an error"
            )

    @property
    def _remedy(self) -> str:
        if any(part.follows for part in self.parts()):
            return "lower lr"
        return "give a larger sigma, or leave out sigma and rho"

    def _to_copy(self, members: list[list[Member]]) -> list[Member]:
        for part in self.parts():
            if not part.known:  # a preconditioner of a user's own may raise half-way
                return [member for of_part in members for member in of_part]
        return []

    def _members(self, slot: int | None = None) -> list[list[Member]]:
        if slot is not None and self.peers is not None:
            self.peers.expect(slot, self._params)
        members: list[list[Member]] = []
        for part in self.parts():
            of_part = []
            for param in part.params:
                member = self.member(param, param.grad, part.group)
                if member is not None:
                    of_part.append(member)
            members.append(of_part)
        return members

    def _local(self, member: Member, group: Group) -> Member:
        preconditioner = self._part_of(member.param, group).preconditioner
        if not dispatch.steps_parts(group, preconditioner):
            return member
        return super()._local(member, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        if self.peers is not None:
            self.peers.cleared(self._params)
        super().zero_grad(set_to_none)

    def join_hook(self, **_: object) -> NoReturn:
        """Refuse `torch.distributed.algorithms.join.Join`: a rank that is done calls `skip()`."""
        raise RuntimeError(
            "Join cannot hold an optimizer of torchpisa: a rank without data still has a dual to "
            "contribute. Call skip() on it, once for each step() of the others"
        )

    # For torchpisa.distributed: parts of a step, taken while the backward pass is still running

    @property
    def last_slot(self) -> int | None:
        """The slot of the batch that ends the round, if it is next."""
        free = self.round.free(self.batches)
        return free[0] if len(free) == 1 else None

    def members_of(
        self, params: Sequence[tuple[int, Tensor, Tensor | None]], with_gradient: bool
    ) -> list[list[Member]]:
        """Return parameters with their state, by part.

        Args:
            params: number of the part, parameter and gradient (None for zero) of each.
            with_gradient: leave out those without gradient.
        """
        parts = self.parts()
        members: list[list[Member]] = [[] for _ in parts]
        for number, param, grad in params:
            member = self.member(param, grad, parts[number].group)
            if member is not None and (grad is not None or not with_gradient):
                members[number].append(member)
        return members

    @torch.no_grad()
    def step_some(
        self,
        params: Sequence[tuple[int, Tensor, Tensor | None]],
        key: Hashable,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step some parameters with the last batch of a round, before `step()` is called.

        Args:
            params: see `members_of`.
            key: names them, for kernels to find again what they have prepared.
            grad_scale: what the gradients were multiplied by.
            found_inf: whether they have infinities, if a GradScaler is in use.
        """
        slot = self.last_slot
        assert self.peers is not None
        assert slot is not None
        reached = self.members_of(params, with_gradient=True)
        if any(m.state["arrived"] >> slot & 1 for of_part in reached for m in of_part):
            raise RuntimeError(
                "backward() ran twice before step(), but what the first one found is on its way "
                "already: accumulate gradients under model.no_sync(), all but the last"
            )
        with Undo(self, self._to_copy(reached)):
            present = self._local_step(slot, reached, key, grad_scale, found_inf)
        if not present:
            for part, of_part in zip(self.parts(), reached, strict=True):
                contribute_duals(part, of_part, slot)
        self.peers.begun = True

    # Groups and state

    def _check_group(self, group: Group) -> None:
        arguments.check_group(group)
        rules = arguments.per_batch(
            "gamma", group["gamma"], group["batches"], arguments.check_gamma
        )
        if group["capturable"] and any(callable(rule) for rule in rules):
            raise ValueError(
                f"gamma must be a number when capturable=True, got {group['gamma']!r}: a replayed "
                "graph runs no Python; change the group's sigma tensors instead"
            )
        for flag in ("capturable", "stochastic_rounding"):
            if group[flag] and group["ranks"] > 1:
                raise ValueError(f"{flag} must be False with a process_group, got True")
        self._check_rules(group)

    def _check_rules(self, group: Group) -> None:
        """Check sigma, rho and what the preconditioner is made from."""
        if group["sigma"] is None:
            raise ValueError("sigma must be a finite number > 0, got None")
        arguments.check_penalties(group, "sigma", "rho")
        if not isinstance(group["preconditioner"], Preconditioner):
            raise ValueError(
                "preconditioner must be a torchpisa.preconditioners.Preconditioner, "
                f"got {group['preconditioner']!r}"
            )

    def _check_loaded(self, group: Group) -> None:
        super()._check_loaded(group)
        self._check_fused(group)

    def _check_fused(self, group: Group) -> None:
        if not group["fused"]:
            return
        from torchpisa.distributed import dtensor

        for part in self._parts_of(0, group):
            params = [dtensor.local(param) for param in part.params]
            dispatch.check_fused(params, part.preconditioner, group, part.follows)

    def _prepare(self, group: Group) -> None:
        """Agree with other ranks on a new group, put its numbers in form, and make its state."""
        params = group["params"]
        self._check_fused(group)
        if self.peers is not None:
            self.peers.add(params)
        device = params[0].device if params else torch.device("cpu")
        if group["capturable"] and isinstance(group["lr"], Tensor) and group["lr"].device != device:
            raise ValueError(
                f"lr must be on the parameters' device {device} when capturable=True, "
                f"got {group['lr']!r}"
            )
        arguments.put_penalties_in_form(group)
        super()._prepare(group)
        if group["initial_consensus"]:
            for part in self._parts_of(0, group):
                self._initial_consensus(part, device)

    @torch.no_grad()
    def _initial_consensus(self, part: Part, device: torch.device) -> None:
        if part.follows:
            return
        total = part.total(part.sigmas)
        if self.peers is not None:
            total = self.peers.sum([total], device).item()
        for param in part.params:
            if param.requires_grad:
                decay = part.group["consensus_decay"]
                param.copy_(pisa.initial_consensus(param, total, decay, part.lr))

    def fresh_state(self, group: Group, batches: int | None = None) -> Callable[[Tensor], Group]:
        """Return a function that makes the state that a parameter of a group starts with."""
        parts = self._parts_of(0, group)
        part_of = {id(param): part for part in parts for param in part.params}
        slots = range(self.batches if batches is None else batches)
        single = group["batches"] == 1 and group["ranks"] == 1

        def make(param: Tensor) -> Group:
            part = part_of[id(param)]
            dtype = param.dtype
            if not dtype.is_complex:
                dtype = group["state_dtype"] or torch.promote_types(dtype, torch.float32)
            dual = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            # In float32 whatever torch's default dtype is: bfloat16 counts to 256.
            wide = torch.promote_types(real(dual).dtype, torch.float32)
            device = param.device if group["capturable"] else "cpu"
            state: Group = {}
            for slot in slots:
                state[state_key("dual", slot)] = dual.clone()
                for name in ("sigma", "level") if part.follows else ():
                    state[state_key(name, slot)] = torch.zeros((), dtype=wide, device=param.device)
                for name, value in initial_state(part.preconditioner, dual).items():
                    state[state_key(name, slot)] = value
                counter = torch.zeros((), dtype=torch.float32, device=device)
                state[state_key("step", slot)] = counter
            if not single:
                state["pending"] = dual
            state["arrived"] = 0
            return state

        return make

    def __getstate__(self) -> dict[str, Any]:
        if self.peers is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be copied or pickled; save its "
                "state_dict(), or use torchpisa.distributed.save"
            )
        return super().__getstate__()
