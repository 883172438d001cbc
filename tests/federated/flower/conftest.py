"""Tests on Flower: without it only test_imports.py is collected, and says so."""

import os
import warnings
from pathlib import Path

import pytest

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0"
)
collect_ignore = [
    "junk.py",
    "liar.py",
    "straggler.py",
]  # can be imported in the apps that they are a part of
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's own imports are not ours to mend
        import flwr.serverapp.strategy  # noqa: F401
except ImportError:
    names = {file.name for file in Path(__file__).parent.glob("*.py")}
    collect_ignore += sorted(names - {"__init__.py", "conftest.py", "test_imports.py"})


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """Yield the process that forks those of all deployments."""
    from tests.federated.flower.deployment import Nursery

    started = Nursery(tmp_path_factory.mktemp("nursery"))
    yield started
    started.close()
