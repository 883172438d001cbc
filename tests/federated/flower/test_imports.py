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


def test_flower_is_installed():
    pytest.importorskip(
        "flwr",
        reason="needs Flower, as all tests in tests/federated/flower: pip install "
        "torchpisa[flower]",
    )
