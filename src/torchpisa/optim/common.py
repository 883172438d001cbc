"""Arguments that PISA, SISA and NSISA share, with their defaults."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from torchpisa.penalty import Gamma

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DEFAULTS", "SHARED", "Common"]


class Common(TypedDict, total=False):
    r"""Arguments that PISA, SISA and NSISA take.

    Attributes:
        gamma: \(\gamma_i\) of equation (2.12), in (0, 1]: sigma is divided by it in every round.
            A number, a function of the iteration (see `torchpisa.penalty`), or one of either per
            batch. SISA takes it only with `sigma`. Default 1.
        batches: \(m\), the number of batches that make a round. `step()` is called once for each
            of them; the weights move in the last call. Default 1.
        weights: \(\alpha_i\), the batches' shares of the data, or their sizes. Constant in time.
            With a `process_group`, those of this rank's batches, which are compared with all
            ranks'. Default equal.
        weight_decay: \(\mu - \lambda\), L2 term in every batch's gradient. Default 0.
        consensus_decay: \(\lambda\), L2 term at the consensus. Default 0.
        clip: largest norm of \(\pi_i + g_i\) over all parameters; None for no clipping. Unlike
            clipping gradients it does not move the solution. Default None.
        dual_decay: factor in [0, 1] on every new dual. Below 1 it forgets, and with unequal
            batches the solution moves. Default 1, the paper.
        initial_consensus: take the paper's very first consensus, \(w^0 S/(S + \lambda)\), when the
            parameters are given to the optimizer. Not when resuming; SISA takes it only with
            `sigma`. Default False.
        nonfinite: what to do with a batch whose gradients are not all finite: `"raise"`, `"skip"`
            (the batch counts as absent) or `"ignore"` (do not look). `"raise"` changes nothing,
            except on a GPU. Not to wait for the device, a step there leaves out what is not finite
            and steps the rest, and a later `step()` raises: fused kernels leave out single entries,
            `foreach` the whole gradient of a parameter, which counts as zero. Default `"raise"`.
        maximize: maximise instead of minimise. Default False.
        foreach: one call per operation for all parameters instead of a loop over them; None
            decides. Default None.
        fused: one pass over memory: on a GPU one launch of a Triton kernel for all parameters of a
            group; on a CPU, for SISA's rule and Identity, a C function for which the compiler at
            hand is called once, or else torch's Adam kernel. True raises ValueError, with the
            reason, where that cannot be done, as for SISA without `sigma`. None uses it where it
            can and, on a CPU, pays, unless `foreach` is given. Default None.
        stochastic_rounding: round what is stored in bfloat16, parameters and state, up or down at
            random so that the error is zero on average: for training in bfloat16 without a
            float32 copy of the weights. Default False.
        capturable: keep everything that changes in tensors on the parameters' device, so that
            whole rounds can be captured in a CUDA graph. Default False.
        state_dtype: dtype of duals and other state; None is the parameter's own, but float32 for
            half-precision parameters. Complex parameters keep theirs. Default None.
        process_group: a `torch.distributed` process group, or a mesh of one dimension, whose ranks
            are the nodes: each holds `batches` of them, with their duals, and the consensus is one
            sum over all ranks. Gradients must be those of the rank's own data; see
            `torchpisa.distributed.attach` for DistributedDataParallel and
            `torchpisa.distributed.shard` for FSDP. When parameters are added, all ranks take those
            of the first. Default None, this process alone.
        reduce_dtype: what crosses the network, such as `torch.bfloat16` for half of the bytes;
            weights are never rounded to it. Default None, the dtype of the state.
    """

    gamma: Gamma | Sequence[Gamma]
    batches: int
    weights: Sequence[float] | None
    weight_decay: float
    consensus_decay: float
    clip: float | None
    dual_decay: float
    initial_consensus: bool
    nonfinite: Literal["raise", "skip", "ignore"]
    maximize: bool
    foreach: bool | None
    fused: bool | None
    stochastic_rounding: bool
    capturable: bool
    state_dtype: torch.dtype | None
    process_group: "ProcessGroup | DeviceMesh | None"
    reduce_dtype: torch.dtype | None


DEFAULTS: Common = {
    "gamma": 1.0,
    "batches": 1,
    "weights": None,
    "weight_decay": 0.0,
    "consensus_decay": 0.0,
    "clip": None,
    "dual_decay": 1.0,
    "initial_consensus": False,
    "nonfinite": "raise",
    "maximize": False,
    "foreach": None,
    "fused": None,
    "stochastic_rounding": False,
    "capturable": False,
    "state_dtype": None,
    "process_group": None,
    "reduce_dtype": None,
}

# One value for the whole optimizer: a round is a round of all parameters.
SHARED = ("batches", "ranks", "weights", "clip", "nonfinite")
