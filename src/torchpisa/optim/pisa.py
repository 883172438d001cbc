"""PISA (Algorithm 1) as a torch optimizer; SISA and NSISA subclass it and change its rules."""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import is_not, itemgetter
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms import pisa
from torchpisa.checks import check_count
from torchpisa.kernels import dispatch
from torchpisa.kernels.job import Kernel, Member, real
from torchpisa.optim import arguments, nonfinite, report
from torchpisa.optim.optimizer import RoundOptimizer, Undo
from torchpisa.optim.peers import DeviceMesh, Peers, ProcessGroup
from torchpisa.optim.round import (
    Group,
    Part,
    Rule,
    clear_arrived,
    clip_scale,
    consensus,
    contribute_duals,
    contribute_missing,
    local_job,
)
from torchpisa.penalty import Gamma
from torchpisa.preconditioners import Identity, Preconditioner
from torchpisa.preconditioners.base import initial_state
from torchpisa.state_keys import state_key
from torchpisa.torch_private import without_autocast

__all__ = ["PISA"]


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
        reduce_dtype: dtype in which contributions cross the network, such as `torch.bfloat16` for
            half of the bytes; weights are never rounded to it. None is the dtype of the state.

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
    _rules: ClassVar[tuple[Rule, ...]] = (Rule((), lambda group, _: group["preconditioner"]),)

    # The other ranks. Not part of a state_dict or a copy.
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
        """Initialise the optimizer from the arguments of a subclass's constructor."""
        family = arguments.family(type(self))
        arguments.reject_foreign_calibration(settings, family)
        settings = arguments.normalized(settings, arguments.FLOATS)
        check_count("batches", settings["batches"])
        arguments.check_shared(settings)
        arguments.check_dtype("reduce_dtype", settings["reduce_dtype"])
        # Not part of the groups, because a process group cannot be saved.
        process_group, reduce_dtype = settings.pop("process_group"), settings.pop("reduce_dtype")
        if process_group is not None:
            from torchpisa.distributed.process_group import join

            self.peers = join(process_group, reduce_dtype)
        shares = arguments.shares if self.peers is None else self.peers.shares
        settings["ranks"] = 1 if self.peers is None else self.peers.size
        settings["weights"] = shares(settings["weights"], settings["batches"])
        self._check_group(settings)
        if settings["sigma"] is not None:
            arguments.warn_about_absolute_lr(settings["lr"], family)
        super().__init__(params, settings)

    def reset_unsaved(self) -> None:
        """Reset what no checkpoint holds: caches, and what watches this run."""
        super().reset_unsaved()
        self._plans: dispatch.Plans = {}
        self._parts: list[Part] = []
        self._parts_for: list[Group] = []
        self._problem: str | None = None
        if self.peers is not None:
            self.peers.reset_round()

    @property
    def _takes_infinities(self) -> bool:
        # The other ranks wait for this one even if its gradients are infinite.
        return self.peers is not None or super()._takes_infinities

    # Rules

    def parts(self) -> list[Part]:
        """Return all parameters, one `Part` for each group and rule."""
        groups = self.param_groups
        if len(groups) != len(self._parts_for) or any(map(is_not, groups, self._parts_for)):
            self._parts_for = list(groups)
            self._parts = [
                part
                for group_index, group in enumerate(groups)
                for part in self._parts_of(group_index, group)
            ]
        return self._parts

    def _parts_of(self, group_index: int, group: Group) -> list[Part]:
        """Return the parts of one group; by default a single one."""
        return [Part(group_index, group, group["params"], self._rules[0])]

    def _part_of(self, param: Tensor, group: Group) -> Part:
        """Return a part that holds one parameter only."""
        (part,) = self._parts_of(0, {**group, "params": [param]})
        return part

    def effective(self) -> list[report.Effective]:
        """Return step size and momentum in the terms of other optimizers, by group and rule."""
        return [report.effective(part, self.state) for part in self.parts()]

    # The step

    def _step_batch(self, slot: int, members: list[list[Member]]) -> None:
        # With DDP the backward pass may have stepped some members already, see `step_bucket`.
        done = 1 << slot if self.peers is not None else 0
        reached = []
        for part_members in members:
            reached.append(
                [m for m in part_members if m.grad is not None and not m.state["arrived"] & done]
            )
        if any(reached) or self.peers is None or not self.peers.step_begun:
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
        """Take the local step of a batch.

        Args:
            slot: the batch.
            reached: the members that have a gradient, by part; all of them, or one DDP bucket.
            key: identifies the set of members, so that kernels can reuse what they prepared.
            grad_scale: factor of a GradScaler on the gradients.
            found_inf: positive if a GradScaler found infinities in them.

        Returns:
            False if the batch counts as absent.
        """
        parts = self.parts()
        kernels = self._kernels(slot, reached, key)
        where = f"batch {slot} of iteration {self.round.iteration}"
        verdict = nonfinite.examine(self.param_groups, reached, kernels, found_inf, where)
        if verdict.problem is not None:
            if self.peers is None:
                raise FloatingPointError(
                    f"{verdict.problem}. Nothing was changed; nonfinite='skip' leaves such "
                    "batches out"
                )
            # The other ranks wait for this one: it completes the round with them, then raises.
            self._problem = verdict.problem
        self._open_round()
        if not verdict.present:
            return False
        moves_weights = self._step_moves_weights
        flags: Sequence[list[Tensor] | None] = [None] * len(parts)
        if any(verdict.deferred):
            flags = self._nonfinite.flags(
                [part.params for part in parts], reached, verdict.deferred
            )
        jobs = []
        for part, part_members, flagged in zip(parts, reached, flags, strict=True):
            job = local_job(part, part_members, slot, verdict.keep, moves_weights)
            job.grad_scale, job.search, job.flags = grad_scale, verdict.search, flagged
            jobs.append(job)
        clip = self.param_groups[0]["clip"]
        if clip is not None:
            scale = clip_scale(jobs, kernels, clip)
            for job in jobs:
                job.clip_scale = scale
        for job, kernel in zip(jobs, kernels, strict=True):
            if job.members:
                dispatch.supporting(kernel, job).local_step(job)
        if verdict.search or any(verdict.deferred):
            self._nonfinite.fetch(kernels, reached, where)
        self.round.add_present(slot, self.batches, None if moves_weights else verdict.keep)
        return True

    def _kernels(self, slot: int, reached: list[list[Member]], key: Hashable) -> list[Kernel]:
        """Return the kernel of each part, see `_local_step`; nothing has changed if it raises."""
        kernels = []
        for index, (part, part_members) in enumerate(zip(self.parts(), reached, strict=True)):
            preconditioner, follows = part.preconditioner, part.group[part.rule.sigma] is None
            if part_members and type(preconditioner).check is not Preconditioner.check:
                preconditioner.check([member.origin for member in part_members])
            kernels.append(
                dispatch.for_local_step(
                    part.group,
                    part_members,
                    preconditioner,
                    slot,
                    follows,
                    (index, key),
                    self._plans,
                )
            )
        return kernels

    @property
    def _step_moves_weights(self) -> bool:
        """True if a round is a single batch, so that its local step includes the consensus."""
        return self.peers is None and self.batches == 1

    def _open_round(self) -> None:
        if self.round.used or (self.peers is not None and self.peers.step_begun):
            return
        # Call all rules for gamma before anything changes: one may raise.
        grown = []
        for part in self.parts():
            if part.group["gamma"] != 1.0 and not part.sigma_follows:
                grown.append((part, part.next_sigmas(self.round.iteration)))
        for part, new in grown:
            if part.group["capturable"]:
                for sigma, value in zip(part.sigmas, new, strict=True):
                    sigma.copy_(value)
            else:
                part.group[part.rule.sigma] = new

    def _finish_batch(self, slot: int, members: list[list[Member]]) -> bool:
        if self.peers is not None:
            self.peers.on_step()
        return super()._finish_batch(slot, members)

    def _consensus(self, members: list[list[Member]]) -> None:
        # With peers, `_end_round` takes the consensus; with one batch, its local step did.
        if self.peers is not None or self._step_moves_weights:
            return
        keep = self.round.keep()
        for part, part_members in zip(self.parts(), members, strict=True):
            reached = [member for member in part_members if member.state["arrived"]]
            contribute_missing(part, reached, self.round)
            consensus(part, reached, part.totals(reached), keep, self._plans)
            clear_arrived(reached)

    def _end_round(self, members: list[list[Member]]) -> None:
        problem, self._problem = self._problem, None
        problems = 0
        if self.peers is not None:
            problems = self.peers.close(
                self.parts(), members, self.round, problem is not None, self._plans
            )
        # Before anything is raised: even if only some ranks raise, observers run on all of them.
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
    def _advice(self) -> str:
        if any(part.sigma_follows for part in self.parts()):
            return "lower lr"
        return "give a larger sigma, or leave out sigma and rho"

    def _needing_backup(self, members: list[list[Member]]) -> list[Member]:
        for part in self.parts():
            if not part.built_in:  # a user's preconditioner may raise half-way
                return [member for part_members in members for member in part_members]
        return []

    def _abandon_batch(self) -> None:
        if self.peers is None:
            slots = self.round.packed()["visited"]
            for state in self.state.values():
                if "arrived" in state:
                    state["arrived"] &= slots

    def _members(self, slot: int | None = None) -> list[list[Member]]:
        if slot is not None and self.peers is not None:
            self.peers.before_step(slot, self.all_params)
        params = list(chain.from_iterable(map(itemgetter("params"), self.param_groups)))
        if len(params) != len(self.all_params) or any(map(is_not, params, self.all_params)):
            # The user has changed a list of parameters, as to prune a model.
            self.all_params, self._parts_for = params, []
        members: list[list[Member]] = []
        for part in self.parts():
            part_members = []
            for param in part.params:
                member = self.member(param, param.grad, part.group)
                if member is not None:
                    part_members.append(member)
            members.append(part_members)
        return members

    def _joins_now(self, param: Tensor, grad: Tensor | None) -> bool:
        # One that was frozen until now may have a gradient on some ranks only, but all must send
        # contributions to the same parameters.
        return grad is not None or (self.peers is not None and param.requires_grad)

    def _local_part(self, member: Member, group: Group) -> Member:
        preconditioner = self._part_of(member.param, group).preconditioner
        if not dispatch.steps_local_parts(group, preconditioner):
            return member
        return super()._local_part(member, group)

    def skip(self, *, batch: int | None = None) -> None:
        """Mark a batch as absent from this round, and use its slot.

        It contributes its dual, as if its gradient were the average of its past gradients.

        Args:
            batch: slot, from 0. By default the first one that is free in this round.

        Raises:
            ValueError: the slot does not exist or was used in this round.
            RuntimeError: a model with `torchpisa.distributed.attach` has taken the batch already.
        """
        if self.peers is not None and self.peers.step_begun:
            raise RuntimeError(
                "skip() is too late for this batch: the backward pass of the attached model has "
                "used its gradients and sent them on. Call step(); nonfinite='skip' leaves "
                "batches out whose gradients are not finite"
            )
        super().skip(batch=batch)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        if self.peers is not None:
            self.peers.on_zero_grad(self.all_params)
        super().zero_grad(set_to_none)

    def join_hook(self, **_: object) -> NoReturn:
        """Refuse `torch.distributed.algorithms.join.Join`; a rank without data calls `skip()`."""
        raise RuntimeError(
            "Join cannot hold an optimizer of torchpisa: a rank without data still has a dual to "
            "contribute. Call skip() on it, once for each step() of the others"
        )

    # For torchpisa.distributed.ddp: steps of single buckets, while the backward pass is running

    @property
    def last_slot(self) -> int | None:
        """The slot of the next batch if it ends the round, else None."""
        free = self.round.free(self.batches)
        return free[0] if len(free) == 1 else None

    def members_by_part(
        self, params: Sequence[tuple[int, Tensor, Tensor | None]], with_gradient: bool
    ) -> list[list[Member]]:
        """Return parameters with their state, by part.

        Args:
            params: index of the part, parameter, and gradient (None for zero).
            with_gradient: leave out those without gradient.
        """
        parts = self.parts()
        members: list[list[Member]] = [[] for _ in parts]
        for index, param, grad in params:
            member = self.member(param, grad, parts[index].group)
            if member is not None and (grad is not None or not with_gradient):
                members[index].append(member)
        return members

    @torch.no_grad()
    def step_bucket(
        self,
        params: Sequence[tuple[int, Tensor, Tensor | None]],
        key: Hashable,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Take the local step of a bucket with the last batch of a round, before `step()`.

        Args:
            params: the bucket's parameters, see `members_by_part`.
            key: identifies the bucket, so that kernels can reuse what they prepared.
            grad_scale: factor of a GradScaler on the gradients.
            found_inf: positive if they have infinities; None without a GradScaler.
        """
        slot = self.last_slot
        assert self.peers is not None
        assert slot is not None
        reached = self.members_by_part(params, with_gradient=True)
        if any(m.state["arrived"] >> slot & 1 for part_members in reached for m in part_members):
            raise RuntimeError(
                "backward() ran twice before step(), but the gradients of the first one have been "
                "used already: accumulate gradients under model.no_sync(), all but the last"
            )
        with without_autocast(), Undo(self, self._needing_backup(reached)):
            present = self._local_step(slot, reached, key, grad_scale, found_inf)
        if not present:
            for part, part_members in zip(self.parts(), reached, strict=True):
                contribute_duals(part, part_members, slot)
        self.peers.step_begun = True

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
        """Check sigma, rho and the settings of the preconditioner."""
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
            dispatch.check_fused(params, part.preconditioner, group, part.sigma_follows)

    def _prepare(self, group: Group) -> None:
        """Agree with other ranks on a new group, normalise its numbers, and make its state."""
        params = group["params"]
        self._check_fused(group)
        if self.peers is not None:
            self.peers.add_params(params)
        device = params[0].device if params else torch.device("cpu")
        if group["capturable"] and isinstance(group["lr"], Tensor) and group["lr"].device != device:
            raise ValueError(
                f"lr must be on the parameters' device {device} when capturable=True, "
                f"got {group['lr']!r}"
            )
        arguments.normalize_penalties(group)
        super()._prepare(group)
        if group["initial_consensus"]:
            for part in self._parts_of(0, group):
                self._initial_consensus(part, device)

    @torch.no_grad()
    def _initial_consensus(self, part: Part, device: torch.device) -> None:
        if part.sigma_follows:
            return
        total = part.total(part.sigmas)
        if self.peers is not None:
            total = self.peers.sum([total], device).item()
        for param in part.params:
            if param.requires_grad:
                decay = part.group["consensus_decay"]
                param.copy_(pisa.initial_consensus(param, total, decay, part.lr))

    def fresh_state(self, group: Group, batches: int | None = None) -> Callable[[Tensor], Group]:
        """Return a function that makes the initial state of a parameter."""
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
            wide = torch.promote_types(real(dual).dtype, torch.float32)
            device = param.device if group["capturable"] else "cpu"
            state: Group = {}
            for slot in slots:
                state[state_key("dual", slot)] = dual.clone()
                for name in ("sigma", "level") if part.sigma_follows else ():
                    state[state_key(name, slot)] = torch.zeros((), dtype=wide, device=param.device)
                for name, value in initial_state(part.preconditioner, dual).items():
                    state[state_key(name, slot)] = value
                # float32 whatever torch's default dtype is: bfloat16 counts to 256 only.
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
