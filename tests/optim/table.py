"""The table of optimizers that drives the generic tests: who, how, and what must be refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.penalty import Every
from torchpisa.preconditioners import SecondMoment
from torchpisa.preconditioners.consensus import Whiten


@dataclass(frozen=True)
class Entry:
    """An optimizer class with settings under which every generic test must pass."""

    name: str
    make: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Any, **more: Any) -> Any:
        return self.make(params, **{**self.settings, **more})

    def key(self, name: str, slot: int = 0) -> str:
        """Name of state: MISA has one dual for all batches."""
        return name if self.make is MISA else f"{name}.{slot}"

    def without_initial_consensus(self, params: Any, **more: Any) -> Any:
        """Make one that leaves the weights as they are."""
        skip = {"initial_consensus": False} if "initial_consensus" in self.settings else {}
        return self(params, **skip, **more)


ENTRIES = [
    Entry("pisa", PISA, {"sigma": 2.0, "rho": 3.0}),
    Entry(
        "pisa-second-moment",
        PISA,
        {"preconditioner": SecondMoment("rmsprop", beta=0.9), "sigma": 1.0, "rho": 100.0},
    ),
    Entry("sisa", SISA),
    Entry("sisa-adagrad", SISA, {"scheme": "adagrad", "eta": 5.0, "eps": 1e-8}),
    Entry("sisa-m3", SISA, {"batches": 3, "weights": [1, 2, 3], "rho": [10.0, 20.0, 30.0]}),
    Entry(
        "sisa-everything",
        SISA,
        {
            "batches": 2,
            "sigma": [1.0, 2.0],
            "gamma": [0.999, Every(0.9)],
            "weight_decay": 0.01,
            "consensus_decay": 0.02,
            "clip": 0.7,
            "dual_decay": 0.9,
            "initial_consensus": True,
        },
    ),
    Entry("nsisa", NSISA, {"ns_dtype": None}),
    Entry(
        "nsisa-m2",
        NSISA,
        {"batches": 2, "nesterov": True, "aspect_scaling": True, "ns_dtype": None},
    ),
    Entry("misa", MISA, {"ns_dtype": None}),
    Entry(
        "misa-m2",
        MISA,
        {
            **{"batches": 2, "weights": [1, 2], "row_beta": None, "momentum": 0.5, "clip": 0.7},
            **{"look_ahead": 1.5, "weight_decay": 0.1, "ns_dtype": None},
        },
    ),
    Entry(
        "misa-whiten",
        MISA,
        {"before": Whiten(every=2), "damping": 0.1, "batches": 2, "ns_dtype": None},
    ),
]


@dataclass(frozen=True)
class BadInput:
    """Arguments that must raise ValueError, with a part of the message."""

    settings: dict[str, Any]
    message: str


BAD_COMMON = [
    BadInput({"sigma": 0.0}, r"sigma must be a finite number > 0, got 0\.0"),
    BadInput({"sigma": -1}, r"sigma must be a finite number > 0, got -1"),
    BadInput({"sigma": float("nan")}, r"sigma must be .* got nan"),
    BadInput({"sigma": float("inf")}, r"sigma must be .* got inf"),
    BadInput({"sigma": "1"}, r"sigma must be .* got '1'"),
    BadInput({"sigma": [1.0, -2.0], "batches": 2}, r"sigma must be .* > 0, got -2\.0"),
    BadInput({"sigma": [1.0, 2.0]}, r"sigma must be one value or a sequence of 1 .* got 2 values"),
    BadInput({"rho": -0.5}, r"rho must be a finite number >= 0, got -0\.5"),
    BadInput({"rho": [1.0] * 3, "batches": 2}, r"rho must be .* sequence of 2 .* got 3 values"),
    BadInput({"gamma": 0.0}, r"gamma must be in \(0, 1\], got 0\.0"),
    BadInput({"gamma": 1.01}, r"gamma must be in \(0, 1\], got 1\.01"),
    BadInput({"gamma": [0.9], "batches": 2}, r"gamma must be .* sequence of 2 .* got 1 values"),
    BadInput({"batches": 0}, r"batches must be an integer >= 1, got 0"),
    BadInput({"batches": 2.0}, r"batches must be an integer >= 1, got 2\.0"),
    BadInput({"batches": True}, r"batches must be an integer >= 1, got True"),
    BadInput({"batches": 2, "weights": [1.0]}, r"weights must be .* sequence of 2 .* got 1 values"),
    BadInput({"weights": 1.0}, r"weights must be None or a sequence of 1 \(batches=1\), got 1\.0"),
    BadInput({"batches": 2, "weights": [1, 0]}, r"weights must be a finite number > 0, got 0"),
    BadInput({"lr": -0.1}, r"lr must be a finite number >= 0, got -0\.1"),
    BadInput({"lr": torch.tensor(-1.0)}, r"lr must be a finite number >= 0, got tensor"),
    BadInput({"weight_decay": -1.0}, r"weight_decay must be a finite number >= 0, got -1\.0"),
    BadInput({"consensus_decay": -1.0}, r"consensus_decay must be a finite number >= 0, got -1\.0"),
    BadInput({"clip": 0.0}, r"clip must be a number > 0, got 0\.0"),
    BadInput({"dual_decay": 1.5}, r"dual_decay must be in \[0, 1\], got 1\.5"),
    BadInput({"nonfinite": "warn"}, r"nonfinite must be one of 'raise', 'skip', 'ignore', got"),
    BadInput({"state_dtype": torch.int32}, r"state_dtype must be None or a real floating dtype"),
    BadInput({"foreach": "yes"}, r"foreach must be one of None, True, False, got 'yes'"),
    BadInput({"fused": "yes"}, r"fused must be one of None, True, False, got 'yes'"),
    BadInput({"fused": True, "foreach": True}, r"fused must be None or False when foreach=True"),
    BadInput({"stochastic_rounding": 1.5}, r"stochastic_rounding must be one of True, False"),
    BadInput({"maximize": "yes"}, r"maximize must be one of True, False, got 'yes'"),
    BadInput(
        {"capturable": True, "gamma": Every(0.9)}, r"gamma must be a number when capturable=True"
    ),
    # True is not 1, and 1 is not True.
    BadInput({"lr": True}, r"lr must be a finite number >= 0, got True"),
    BadInput({"sigma": True}, r"sigma must be a finite number > 0, got True"),
    BadInput({"lr": torch.tensor(True)}, r"lr must be a finite number >= 0, got tensor\(True\)"),
    BadInput({"lr": torch.tensor(1j)}, r"lr must be a finite number >= 0, got tensor"),
    BadInput({"lr": 10**400}, r"lr must be .*, got 1000"),
    BadInput({"maximize": 1}, r"maximize must be one of True, False, got 1"),
    BadInput({"foreach": 0}, r"foreach must be one of None, True, False, got 0"),
    BadInput({"nonfinite": True}, r"nonfinite must be one of .* got True"),
]

BAD_OWN = {
    PISA: [
        BadInput({"preconditioner": "adam"}, r"preconditioner must be a .*Preconditioner, got 'ad"),
    ],
    SISA: [
        BadInput({"scheme": "rms"}, r"scheme must be one of 'adagrad', 'rmsprop', 'adam', got 'rm"),
        BadInput({"beta": 1.0}, r"beta must be in \(0, 1\), got 1\.0"),
        BadInput({"eta": 0.0}, r"eta must be a number > 0, got 0\.0"),
        BadInput({"eps": -1e-8}, r"eps must be a finite number >= 0, got -1e-08"),
    ],
    NSISA: [
        BadInput({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        BadInput({"ns_steps": 0}, r"ns_steps must be an integer >= 1, got 0"),
        BadInput({"ns_steps": 10**9}, r"ns_steps must be an integer <= 100, got 1000000000"),
        BadInput({"ns_dtype": torch.int8}, r"ns_dtype must be a real floating dtype.* got torch"),
        BadInput({"perturbation": 1.0}, r"perturbation must be in \[0, 1\), got 1\.0"),
        BadInput({"sisa_sigma": 0.0}, r"sisa_sigma must be a finite number > 0, got 0\.0"),
        BadInput({"sisa_rho": -1.0}, r"sisa_rho must be a finite number >= 0, got -1\.0"),
    ],
    MISA: [
        BadInput({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        BadInput({"look_ahead": 0.9}, r"look_ahead must be a finite number >= 1, got 0\.9"),
        BadInput({"before": "whiten"}, r"before must be None or a stage of .*, got 'whiten'"),
        BadInput({"blocks": 0}, r"blocks must be an integer >= 1, got 0"),
        BadInput({"damping": -0.1}, r"damping must be a finite number >= 0, got -0\.1"),
        BadInput({"row_beta": 1.0}, r"row_beta must be in \[0, 1\), got 1\.0"),
        BadInput({"beta": 0.0}, r"beta must be in \(0, 1\), got 0\.0"),
        BadInput({"eps": -1e-8}, r"eps must be a finite number >= 0, got -1e-08"),
        BadInput({"ns_steps": 0}, r"ns_steps must be an integer >= 1, got 0"),
        BadInput({"ns_steps": 10**9}, r"ns_steps must be an integer <= 100, got 1000000000"),
        BadInput({"ns_dtype": torch.int8}, r"ns_dtype must be a real floating dtype.* got torch"),
    ],
}
