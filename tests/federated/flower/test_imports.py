"""Flower is for those who ask for it."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torchpisa, torchpisa.federated
print(sorted({"flwr", "ray", "httpx", "cryptography"} & set(sys.modules)))
"""


def test_flower_is_not_imported_unasked():
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.strip() == "[]"


WITHOUT = """
import sys
sys.modules["flwr"] = sys.modules["opacus"] = None  # importing them raises ModuleNotFoundError
try:
    import torchpisa.federated.flower
except ModuleNotFoundError as error:
    print(error)
from torchpisa.federated import GaussianNoise
try:
    GaussianNoise.for_epsilon(8.0, clip=1.0, rounds=3, clients=3)
except ModuleNotFoundError as error:
    print(error)
"""


def test_errors_say_what_to_install():
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.splitlines() == [
        "torchpisa.federated.flower needs Flower: pip install 'torchpisa[flower]'",
        "an epsilon needs opacus: pip install 'torchpisa[privacy]'",
    ]


def test_flower_is_installed():
    pytest.importorskip(
        "flwr",
        reason="needs Flower, as all tests in tests/federated/flower: pip install "
        "torchpisa[flower]",
    )
