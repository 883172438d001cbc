"""DistributedDataParallel with a consensus in place of the average of gradients."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from torchpisa.distributed.process_group import ATTACHED, Ranks
from torchpisa.optim.pisa import PISA
from torchpisa.torch_private import ddp_hooks, loss_scale

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["attach"]

# Size of the first bucket, which is small so that communication starts early.
_FIRST_BYTES = 2**20


def attach(
    optimizer: PISA,
    model: "DistributedDataParallel",
    *,
    scaler: "torch.amp.GradScaler | None" = None,
) -> None:
    """Let the backward pass of `model` take the local steps of `optimizer`.

    As soon as a bucket of gradients is complete, its parameters are stepped and the sum of their
    contributions over all ranks is started, while the backward pass goes on. `optimizer.step()`
    waits for the sums and moves the weights. Gradients stay those of each rank's own data.

    What needs all gradients at once waits for `step()`: `clip`, preconditioners that solve for all
    parameters together, and, of several batches per rank, all but the last of a round. So do the
    sums of the first round, in which the order of gradients is learned.

    Call it once, on every rank, before the first backward pass. Gradients that are changed between
    the backward pass and `step()`, by `torch.nn.utils.clip_grad_norm_` for instance, have been used
    by then: give the optimizer `clip` instead.

    Args:
        optimizer: one with a `process_group` of the same ranks as the model's.
        model: the model; the optimizer must have all of its trained parameters.
        scaler: the GradScaler, if one is used, because the backward pass sees scaled gradients.
    """
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model must be a torch.nn.parallel.DistributedDataParallel, got "
            f"{type(model).__name__}; any other model needs no attach"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
    if not isinstance(optimizer, PISA):
        raise ValueError(
            f"optimizer must be a PISA, SISA or NSISA, got {type(optimizer).__name__}; MISA takes "
            "the averages of DistributedDataParallel as they are, without attach"
        )
    theirs = distributed.get_process_group_ranks(model.process_group)
    if optimizer.peers is None:
        if len(theirs) > 1:
            raise ValueError(
                "optimizer must have been made with process_group=, for example "
                "torch.distributed.group.WORLD, to be attached to a model"
            )
        return  # a single rank averages nothing
    ranks = optimizer.peers
    assert isinstance(ranks, Ranks)
    ours = distributed.get_process_group_ranks(ranks.group)
    if ours != theirs:
        raise ValueError(
            f"optimizer must have the process_group of the model, ranks {theirs}, got {ours}"
        )
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.module.named_parameters():
        if param.requires_grad and id(param) not in known:
            raise ValueError(
                f"optimizer must have all parameters of the model that are trained, but not {name}:"
                " nobody would average its gradient"
            )
    if ddp_hooks(model):
        raise ValueError(
            "model must not have a communication hook yet, such as that of an optimizer that was "
            "attached before: wrap its module in DistributedDataParallel anew"
        )
    earlier = ranks.attached
    if isinstance(earlier, _Hook) and not earlier.is_for_part_of(model):
        raise ValueError(
            "optimizer must not be attached to several models: put them into one module and wrap "
            "that in DistributedDataParallel, or give each model an optimizer of its own"
        )
    hook = _Hook(optimizer, ranks, model, scaler)
    model.register_comm_hook(None, lambda _, bucket: hook.on_bucket(bucket))
    ranks.attached = hook
    ATTACHED.add(model)
    for name in ("join", "join_hook"):  # called by `model.join()` and `Join([model])`
        setattr(model, name, _refuse_join)


class _Hook:
    """Communication hook of a model: called for every bucket, on the thread that runs backward.

    Contributions are sent in buckets of our own. They are made once, in the order in which
    gradients arrived in the first backward pass, because DistributedDataParallel changes its
    buckets after that pass: sums depend on the order of their terms, so a resumed run would differ
    in its last bits.

    Nothing here refers to the model, and hooks of parameters do not refer to this one: the garbage
    collector does not see what torch calls during a backward pass, and would never free any of it.
    """

    def __init__(
        self,
        optimizer: PISA,
        ranks: Ranks,
        model: "DistributedDataParallel",
        scaler: "torch.amp.GradScaler | None",
    ) -> None:
        self._optimizer = optimizer
        self._ranks = ranks
        self._scaler = scaler
        self._part_of: dict[int, int] = {}
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._order: dict[int, None] = {}
        self._buckets: list[list[Tensor]] | None = None
        self._bucket_bytes = model.bucket_bytes_cap
        self._ready: set[int] = set()
        self._sent_count = 0
        # Buckets hold zeros for unused parameters, so we track which parameters got a gradient.
        self._tracks_gradients = bool(model.find_unused_parameters or model.static_graph)
        self._with_gradient: set[int] = set()
        with_gradient, order = self._with_gradient, self._order

        def on_gradient(param: Tensor) -> None:
            with_gradient.add(id(param))
            order[id(param)] = None

        self._handles = [
            param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            for param in self._params
        ]

    def is_for_part_of(self, model: "DistributedDataParallel") -> bool:
        """Return whether a model has all parameters of this hook's, as when wrapped anew."""
        return {*map(id, self._params)} <= {*map(id, model.parameters())}

    def on_bucket(self, bucket: "GradBucket") -> torch.futures.Future[Tensor]:
        """Step the parameters of a bucket and send complete buckets; leave gradients unchanged."""
        if self._overlaps():
            buffer = bucket.buffer()
            scale = found_inf = None
            if self._scaler is not None and self._scaler.is_enabled():
                scale = loss_scale(self._scaler)
                found_inf = buffer.isfinite().all().logical_not()
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            params = [
                (self._part_index(param), param, grad if self._has_gradient(param) else None)
                for param, grad in pairs
            ]
            self._optimizer.step_bucket(params, bucket.index(), scale, found_inf)
            self._ready |= {id(param) for _, param, _ in params}
            self._send()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _send(self) -> None:
        """Send those of our buckets that are complete, in order."""
        for bucket in (self._buckets or [])[self._sent_count :]:
            if not all(id(param) in self._ready for param in bucket):
                break
            params = [(self._part_index(param), param, None) for param in bucket]
            optimizer = self._optimizer
            members = optimizer.members_by_part(params, with_gradient=False)
            self._ranks.contribute(optimizer.parts(), members, optimizer.round, math.inf)
            self._sent_count += 1

    def before_step(self, slot: int) -> None:
        """Send what the backward pass has left; raise RuntimeError if it did not run."""
        if self._overlaps():
            if slot != self._optimizer.last_slot or not self._ranks.step_begun:
                raise RuntimeError(
                    "no gradients are on their way: an attached optimizer needs a backward pass of "
                    "the DistributedDataParallel model, not under no_sync(), before the step() "
                    "that ends a round, on every rank; skip() cannot take its place"
                )
            if self._buckets is None:
                self._make_buckets()
                self._send()
            self._ready.clear()
            self._sent_count = 0
        self._with_gradient.clear()

    def _make_buckets(self) -> None:
        """Make our buckets, in the order of the first rank, because the order may differ."""
        number = {id(param): index for index, param in enumerate(self._params)}
        order = [number[key] for key in self._order]
        order += [index for index in reversed(range(len(self._params))) if index not in order]
        params = [self._params[index] for index in self._ranks.gather(order)[0]]
        self._buckets = _in_buckets(params, self._bucket_bytes)
        if not self._tracks_gradients:
            for handle in self._handles:
                handle.remove()

    def _overlaps(self) -> bool:
        """Return whether the next step ends a round and can be taken bucket by bucket."""
        optimizer = self._optimizer
        if optimizer.last_slot is None or optimizer.param_groups[0]["clip"] is not None:
            return False
        return not any(part.preconditioner.joint for part in optimizer.parts())

    def _has_gradient(self, param: Tensor) -> bool:
        return not self._tracks_gradients or id(param) in self._with_gradient

    def _part_index(self, param: Tensor) -> int:
        if id(param) not in self._part_of:
            self._part_of = {
                id(each): number
                for number, part in enumerate(self._optimizer.parts())
                for each in part.params
            }
        return self._part_of[id(param)]


def _in_buckets(params: Sequence[Tensor], limit: float) -> list[list[Tensor]]:
    """Return parameters, in their order, divided into buckets of about `limit` bytes."""
    buckets: list[list[Tensor]] = [[]]
    capacity, size = min(_FIRST_BYTES, limit), 0
    for param in params:
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
        if size >= capacity:
            buckets.append([])
            capacity, size = limit, 0
    return [bucket for bucket in buckets if bucket]


def _refuse_join(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "join() cannot be used with an attached optimizer: it stands in for the ranks that are "
        "done with zero gradients, and every rank still has a dual to contribute. Give all ranks "
        "the same number of batches, or leave attach out and call skip() on those that are done"
    )
