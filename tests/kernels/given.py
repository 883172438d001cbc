"""SISA and NSISA with sigma and rho: fused kernels are for penalties that are given."""

from typing import Any

import torchpisa


class SISA(torchpisa.SISA):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **{"sigma": 0.5, "rho": 1e3, **settings})


class NSISA(torchpisa.NSISA):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **{"sisa_sigma": 0.5, "sisa_rho": 1e3, **settings})
