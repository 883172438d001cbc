"""MISA as a torch optimizer: matrices are orthogonalised, the rest steps as in AdamW. Ours."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.kernels import dispatch
from torchpisa.kernels.job import PLAIN_TYPES, Member, compute_dtype, real
from torchpisa.kernels.misa import (
    ConsensusJob,
    ConsensusKernel,
    block_shape,
    gradients,
    is_stack,
)
from torchpisa.optim import arguments
from torchpisa.optim.nonfinite import examine
from torchpisa.optim.optimizer import RoundOptimizer, names_of
from torchpisa.optim.param_groups import is_matrix, looks_like_embedding
from torchpisa.optim.peers import DeviceMesh, ProcessGroup
from torchpisa.optim.round import Group
from torchpisa.preconditioners.consensus import Stage
from torchpisa.preconditioners.consensus.base import check_names

__all__ = ["MISA"]

# Settings that are floats, also where an integer was given.
_FLOATS: Group = dict.fromkeys(
    ("lr", "momentum", "weight_decay", "look_ahead", "row_beta", "damping", "beta", "eps"), 0.0
)


class MISA(RoundOptimizer):
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
    Sharded matrices are orthogonalised once, each by one of the ranks that share it; copies of
    them too, if `replicas` are given.

    Args:
        params: parameters, named parameters or parameter groups. A group may override everything
            but `batches`, `weights`, `clip` and `nonfinite`, and decide by `matrix=True` or `False`
            whether its matrices are orthogonalised. `torchpisa.optim.param_groups.split(model)`
            makes groups that know the model's embeddings and output layer.
        lr: learning rate, comparable to AdamW's: a number or a tensor.
        momentum: \(\mu\), decay of the average of gradients, in [0, 1).
        weight_decay: \(\lambda\), decoupled from the gradient as in AdamW; not of vectors, such as
            biases and the weights of norms. Steps of matrices do not shrink with their gradients,
            so in long trainings without normalisation layers this is what keeps them in bounds.
        look_ahead: \(c \ge 1\). 2 is the paper's consensus, `1 + momentum` Nesterov momentum.
        before: a transformation of the U of a matrix before it is orthogonalised, a stage of
            `torchpisa.preconditioners.consensus`: `Whiten()`, `EigenbasisMoment()`, or None for
            nothing. Stages have state of their own, and cannot be captured in a CUDA graph.
        damping: \(\tau \ge 0\), orthogonalise less sharply: a singular value s of U becomes
            \(s / \sqrt{s^2 + \tau^2}\), \(\tau\) as a multiple of their root mean square, instead
            of 1.
        blocks: matrices that every parameter consists of, to be orthogonalised one by one: blocks
            of consecutive rows, such as 3 for queries, keys and values in one, or 3 times the
            heads; or the entries of a stack, such as the matrices of so many experts in a
            parameter of three dimensions. Each has its own stage. Give it to the groups that need
            it.
        row_beta: decay of the rows' mean squares, in [0, 1); None to leave rows as they are, which
            with `look_ahead=1 + momentum` is Muon.
        beta: decay of the second moment of everything but matrices, in (0, 1).
        eps: added to the roots in denominators.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: dtype of their products: a dtype, None for that of the state, or
            `"auto"`: float16 on GPUs and, for matrices of 131,072 elements or more in all,
            bfloat16 on CPUs that have instructions for it; never for float64 parameters.
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
        fused: Triton kernels, on GPUs: True to get an error where they are not possible; None takes
            them where they are.
        stochastic_rounding: round what is stored in bfloat16 up or down at random, so that the
            error is zero on average.
        capturable: keep counters on the parameters' device, so that a round can be captured in a
            CUDA graph.
        state_dtype: dtype of the state; None is the parameter's own, but float32 for half-precision
            parameters.
        replicas: a process group, or a mesh of one dimension, whose ranks hold the same parameters
            and the same gradients, as under DistributedDataParallel or along `mesh["replicate"]` of
            HSDP. Each matrix is then orthogonalised by one of them, which sends the result to the
            others. All of them call `step()` equally often. None has every rank orthogonalise all.

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

    one_dual = True
    _dual_key = "dual"
    # Processes that take the same step. Not part of a state_dict or a copy.
    _replicas: ProcessGroup | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.1,
        look_ahead: float = 2.0,
        before: Stage | None = None,
        damping: float = 0.0,
        blocks: int = 1,
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
        fused: bool | None = None,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        replicas: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        settings = arguments.normalized(arguments.of_constructor(locals()), _FLOATS)
        settings["matrix"] = None
        if settings.pop("replicas") is not None:
            from torchpisa.distributed.process_group import group_of

            self._replicas = group_of("replicas", replicas)
        check_count("batches", settings["batches"])
        arguments.check_shared(settings)
        settings["weights"] = arguments.shares(settings["weights"], settings["batches"])
        self._check_group(settings)
        super().__init__(params, settings)

    def reset_unsaved(self) -> None:
        """Reset what no checkpoint holds: caches, and what watches this run."""
        super().reset_unsaved()
        self._plans: dispatch.Plans = {}

    # The step

    def _step_batch(self, slot: int, members: list[list[Member]]) -> None:
        jobs = self._jobs(self._with_gradient(members))
        # With several batches this step only adds up gradients, for which there are no plans.
        plans = self._plans if self.batches == 1 else None
        kernels = [dispatch.for_misa(job, key, plans) for key, job in jobs.items()]
        reached = [job.members for job in jobs.values()]
        where = f"batch {slot} of iteration {self.iteration}"
        found_inf = getattr(self, "found_inf", None)
        verdict = examine(self.param_groups, reached, kernels, found_inf, where)
        if verdict.problem is not None:
            raise FloatingPointError(
                f"{verdict.problem}. Nothing was changed; nonfinite='skip' leaves such batches out"
            )
        if verdict.present:
            params = [job.settings["params"] for job in jobs.values()]
            flags = self._nonfinite.flags(params, reached, verdict.deferred)
            for job, flagged in zip(jobs.values(), flags, strict=True):
                job.keep, job.search, job.flags = verdict.keep, verdict.search, flagged
                job.maximize = job.settings["maximize"]
                job.grad_scale = getattr(self, "grad_scale", None)
            self._add(slot, list(jobs.values()), kernels)
            self.round.add_present(slot, self.batches, None if self.batches == 1 else verdict.keep)
        if verdict.search or any(verdict.deferred):
            self._nonfinite.fetch(kernels, reached, where)

    def _with_gradient(self, members: list[list[Member]]) -> list[list[Member]]:
        """Return the parameters with a gradient on any of the processes that share them.

        One with a gradient on other processes only counts as having gradient zero, because all
        processes have to take part in orthogonalising it.
        """
        everyone: Sequence[Sequence[Member | None]] = members
        wholes = [
            m.whole for group_members in members for m in group_members if m.whole is not None
        ]
        if wholes or self._replicas is not None:
            from torchpisa.distributed import dtensor, owners

            over = dtensor.mesh_groups(wholes[:1])
            if self._replicas is not None and self._replicas not in over:
                over.append(self._replicas)
            trained = [param for param in self.all_params if param.requires_grad]
            missing = owners.with_gradient_elsewhere(trained, over)
            if missing:
                everyone = [
                    [
                        self.member(p, torch.zeros_like(p) if id(p) in missing else p.grad, group)
                        for p in group["params"]
                    ]
                    for group in self.param_groups
                ]
        return [
            [m for m in group_members if m is not None and m.grad is not None]
            for group_members in everyone
        ]

    def _add(self, slot: int, jobs: list[ConsensusJob], kernels: Sequence[ConsensusKernel]) -> None:
        """Add gradients to the sum of the round; with one batch per round, take the consensus."""
        clip = self.param_groups[0]["clip"]
        if clip is not None:
            scale = _clip_scale(jobs, kernels, clip)
            for job in jobs:
                job.clip_scale = scale
        for job, kernel in zip(jobs, kernels, strict=True):
            if self.batches == 1:
                kernel.consensus_step(job)
                continue
            weight = job.settings["weights"][slot]
            for member, grad in zip(job.members, gradients(job), strict=True):
                self._accumulate(member, grad, weight, job.keep)

    def _jobs(
        self, members: list[list[Member]], sums: Mapping[int, Tensor] | None = None
    ) -> dict[Hashable, ConsensusJob]:
        """Return one job for all parameters of the same group, rule, device, dtypes and layout.

        Args:
            members: the parameters, by group.
            sums: the gradients summed over a round, by `id` of the parameter; None with one batch.
        """
        jobs: dict[Hashable, ConsensusJob] = {}
        for number, (group, group_members) in enumerate(
            zip(self.param_groups, members, strict=True)
        ):
            lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else float(group["lr"])
            for member in group_members:
                param, dual = member.param, member.state["dual"]
                grad = member.grad if sums is None else sums[id(member.origin)]
                assert grad is not None
                matrix, decays = "moment" not in member.state, member.origin.dim() > 1
                if matrix and group["blocks"] > 1:  # the user may have changed it
                    _check_blocks(member.origin, group["blocks"])
                if matrix and group["row_beta"] is not None:
                    _check_state_of_rows(group, member.origin, self.state[member.origin])
                dtypes = param.dtype, dual.dtype, grad.dtype
                layout = None
                if member.whole is not None:
                    layout = member.whole.placements, member.whole.device_mesh  # type: ignore[attr-defined]
                kind = number, matrix, decays, param.get_device(), dtypes, layout
                job = jobs.get(kind)
                if job is None:
                    if matrix and group["before"] is not None:
                        _check_not_captured(group, param)
                        _check_state_of_stage(group, member.origin, self.state[member.origin])
                    job = jobs[kind] = ConsensusJob(
                        members=[],
                        grads=[],
                        matrix=matrix,
                        settings=group,
                        lr=lr,
                        weight_decay=float(group["weight_decay"]) if decays else 0.0,
                        round=self.iteration,
                        replicas=self._replicas,
                    )
                job.members.append(member)
                job.grads.append(grad)
        return jobs

    def _accumulate(self, member: Member, grad: Tensor, weight: float, keep: Tensor | None) -> None:
        """Add a batch's share of the gradient to the sum of the round."""
        dual = real(member.state["dual"])
        if keep is not None:  # the gradient of an absent batch counts as the average of the past
            grad = torch.where(keep.to(grad.device), grad, -dual.to(grad.dtype))
        state = self.state[member.origin]
        if "pending" not in state:
            # At least float32: the sum over a round must not lose its small terms.
            dtype = torch.promote_types(state["dual"].dtype, torch.float32)
            state["pending"] = torch.zeros_like(state["dual"], dtype=dtype)
        real(member.state["pending"]).add_(grad, alpha=weight)

    def _consensus(self, members: list[list[Member]]) -> None:
        if self.batches == 1:  # the step has moved the weights
            return
        keep = self.round.keep()
        sums: dict[int, Tensor] = {}
        reached: list[list[Member]] = []
        for group, group_members in zip(self.param_groups, members, strict=True):
            shares = enumerate(group["weights"])
            absent = sum(share for slot, share in shares if slot not in self.round.present)
            reached.append([member for member in group_members if "pending" in member.state])
            for member in reached[-1]:
                dual = real(member.state["dual"])
                total = real(member.state["pending"]).to(compute_dtype(real(member.param), dual))
                sums[id(member.origin)] = total.sub_(dual, alpha=absent) if absent else total
                del member.state["pending"]
        for key, job in self._jobs(reached, sums).items():
            job.keep = keep
            dispatch.for_misa(job, key, self._plans).consensus_step(job)

    # Groups and state

    def fresh_state(self, group: Group, batches: int | None = None) -> Callable[[Tensor], Group]:
        """Return a function that makes a parameter's state, the same for all numbers of batches."""
        pairs = zip(group["params"], names_of(group), strict=True)
        names = {id(param): name for param, name in pairs}

        def make(param: Tensor) -> Group:
            dtype = param.dtype
            if not dtype.is_complex:
                dtype = group["state_dtype"] or torch.promote_types(dtype, torch.float32)
            state: Group = {"dual": torch.zeros_like(param, dtype=dtype, requires_grad=False)}
            if not _is_orthogonalized(param, group, names[id(param)]):
                state["moment"] = torch.zeros_like(state["dual"])
            else:
                if group["row_beta"] is not None:
                    # (rows, 1, ...), so that it is sharded with the rows of its parameter.
                    leading = 2 if is_stack(param, group["blocks"]) else 1
                    narrow = (*[slice(None)] * leading, *[slice(1)] * (param.dim() - leading))
                    state["rows"] = state["dual"][narrow].clone()
                if group["before"] is not None:
                    state.update(_state_of_stage(group, param, state["dual"]))
            device = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            return state

        return make

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state.get("param_groups", ()):  # pickled by a version without these settings
            group.setdefault("before", None)
            group.setdefault("damping", 0.0)
            group.setdefault("blocks", 1)
            group.setdefault("fused", None)
        super().__setstate__(state)

    def _check_group(self, group: Group) -> None:
        check_range("lr", group["lr"], 0, high_open=True)
        check_range("momentum", group["momentum"], 0, 1, high_open=True)
        check_range("weight_decay", group["weight_decay"], 0, high_open=True)
        check_range("look_ahead", group["look_ahead"], 1, high_open=True)
        before = group["before"]
        if not (before is None or isinstance(before, Stage)):
            raise ValueError(
                "before must be None or a stage of torchpisa.preconditioners.consensus, such as "
                f"Whiten(), got {before!r}"
            )
        if before is not None:
            check_names(before)
        check_range("damping", group["damping"], 0, high_open=True)
        check_count("blocks", group["blocks"])
        if group["row_beta"] is not None:
            check_range("row_beta", group["row_beta"], 0, 1, high_open=True)
        check_range("beta", group["beta"], 0, 1, low_open=True, high_open=True)
        check_range("eps", group["eps"], 0, high_open=True)
        check_count("ns_steps", group["ns_steps"], high=100)
        arguments.check_ns_dtype(group["ns_dtype"])
        for flag in ("maximize", "capturable", "stochastic_rounding"):
            check_choice(flag, group[flag], (True, False))
        check_choice("matrix", group["matrix"], (None, True, False))
        arguments.check_kernels(group)
        arguments.check_dtype("state_dtype", group["state_dtype"])

    def _prepare(self, group: Group) -> None:
        _check_matrices(group)
        dispatch.check_fused_misa(group)
        if self._replicas is not None:
            from torchpisa.distributed.owners import check_replicas

            check_replicas(group["params"], self._replicas)
        super()._prepare(group)

    def _check_loaded(self, group: Group) -> None:
        super()._check_loaded(group)
        _check_matrices(group)
        dispatch.check_fused_misa(group)

    def upgrade_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state_dict without the `moves` that earlier versions wrote."""
        groups = [
            {name: value for name, value in group.items() if name != "moves"}
            if isinstance(group, dict)
            else group
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "param_groups": groups}


def _clip_scale(
    jobs: Sequence[ConsensusJob], kernels: Sequence[ConsensusKernel], clip: float
) -> Tensor | None:
    """Return the factor that limits the norm of r over all parameters to `clip`."""
    squares: list[Tensor] = []
    for job, kernel in zip(jobs, kernels, strict=True):
        norms = kernel.residual_norms(job)
        total = torch.stack([norm.double().square() for norm in norms]).sum()
        squares.append(total.to(squares[0].device) if squares else total)
    if not squares:
        return None
    if any(job.members[0].whole is not None for job in jobs):
        from torchpisa.distributed import dtensor

        # The members of a job are all sharded in the same way.
        over = [dtensor.groups_of_parts(job.members[0].origin) for job in jobs]
        squares = dtensor.summed_together(squares, over)
    total = torch.stack(squares).sum()
    return (clip / total.sqrt()).clamp(max=1)


def _state_of_stage(group: Group, param: Tensor, dual: Tensor) -> dict[str, Tensor]:
    """Return the initial state of a stage, sharded by rows if the matrix is sharded."""
    if type(param) in PLAIN_TYPES:
        return _state_of_blocks(group, param, dual)
    from torchpisa.distributed import dtensor, owners

    state = _state_of_blocks(group, param, dtensor.local(dual))
    return {name: owners.shard_rows_like(value, param) for name, value in state.items()}


def _state_of_blocks(group: Group, param: Tensor, like: Tensor) -> dict[str, Tensor]:
    """Return the initial state of a stage on one process, block below block."""
    n, k = sorted(block_shape(param, group["blocks"]))
    state: dict[str, Tensor] = group["before"].init_state(n, k, like)
    if group["blocks"] > 1:
        state = {name: torch.cat([value] * group["blocks"]) for name, value in state.items()}
    return state


def _check_state_of_stage(group: Group, param: Tensor, state: Group) -> None:
    """Raise ValueError if the state of a stage is not for the blocks that a group has now."""
    expected = _state_of_blocks(group, param, torch.empty(0, device="meta"))
    for name, value in expected.items():
        if name not in state or state[name].shape != value.shape:
            raise ValueError(
                "before and blocks must stay what they were when the state was made, got "
                f"{group['before']!r} and {group['blocks']} for one of shape {tuple(param.shape)}"
            )


def _check_state_of_rows(group: Group, param: Tensor, state: Group) -> None:
    """Raise ValueError if there is not one average for each row of a group's blocks."""
    leading = 2 if is_stack(param, group["blocks"]) else 1
    if "rows" not in state or state["rows"].numel() != math.prod(param.shape[:leading]):
        raise ValueError(
            "row_beta and blocks must stay what they were when the state was made, got "
            f"{group['row_beta']!r} and {group['blocks']} for one of shape {tuple(param.shape)}"
        )


def _check_not_captured(group: Group, param: Tensor) -> None:
    """Raise RuntimeError if the step of a group with a stage is captured in a CUDA graph."""
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"before must be None for a CUDA graph, got {group['before']!r}: its refreshes are not "
            "in every round, and a graph would replay one round. Step outside of the graph"
        )


def _is_orthogonalized(param: Tensor, group: Group, name: str | None) -> bool:
    if group["matrix"] is not None or not is_matrix(param):
        return bool(group["matrix"]) and is_matrix(param)
    if param.size(0) == 1 or param.numel() == param.size(0):  # a single row or column
        return False
    return not looks_like_embedding(name, param)


def _check_matrices(group: Group) -> None:
    pairs = zip(group["params"], names_of(group), strict=True)
    for param, name in pairs:
        if group["blocks"] > 1 and _is_orthogonalized(param, group, name):
            _check_blocks(param, group["blocks"])
        if (
            group["before"] is not None
            and type(param) not in PLAIN_TYPES
            and _is_orthogonalized(param, group, name)
        ):
            from torchpisa.distributed.owners import is_sharded_once

            if not is_sharded_once(param):
                raise ValueError(
                    "before must be None for parameters that are sharded along several dimensions "
                    f"of a mesh, got {group['before']!r} for one of shape {tuple(param.shape)}. "
                    "Shard them along one dimension only, as fully_shard does, or leave `before` "
                    "out"
                )
        if group["matrix"] and not is_matrix(param):
            raise ValueError(
                "matrix must be None or False for parameters that are not real matrices, "
                f"got True for one of shape {tuple(param.shape)}"
            )


def _check_blocks(param: Tensor, blocks: int) -> None:
    shape = tuple(param.shape)
    if param.size(0) % blocks or (param.size(0) == blocks and param.dim() < 3):
        raise ValueError(
            f"blocks must divide the rows of every matrix into blocks of two or more, got {blocks} "
            f"for one of shape {shape}: give parameters of different blocks groups of their own"
        )
