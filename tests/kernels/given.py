"""SISA and NSISA with sigma and rho: fused kernels are for penalties that are given."""

from typing import Any

import torchpisa


def SISA(params: Any, **settings: Any) -> torchpisa.SISA:
    return torchpisa.SISA(params, **{"sigma": 0.5, "rho": 1e3, **settings})


def NSISA(params: Any, **settings: Any) -> torchpisa.NSISA:
    return torchpisa.NSISA(params, **{"sisa_sigma": 0.5, "sisa_rho": 1e3, **settings})
