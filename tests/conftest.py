"""Seeds, groups of tests, the skip of those that need a GPU, Triton's interpreter without one."""

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

# Before anything imports triton, which looks at it once.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Likewise for numba: compiling Tianshou's loops takes longer than running them.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config.option, "loadgroup", False):
        for item in items:
            _keep_group(item)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare garbage collections what is there before the first test: a million objects."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it be collected, or libraries complain of leaks when Python ends."""
    gc.unfreeze()


def _keep_group(item: pytest.Item) -> None:
    """Let pytest-xdist see the group of a test, which it looks for behind an @ in its id.

    pytest-xdist 3.8 writes it to `_nodeid`, which pytest 9.2 does not read: without this, groups
    are silently ignored, and all tests with processes of their own run beside one another.
    """
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return
    suffix = f"@{mark.args[0]}"
    if not item.nodeid.endswith(suffix):
        from _pytest.nodeid import coerce_node_id

        item._id = coerce_node_id(item.nodeid + suffix)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Begin with the same seed, and end the fast products that recipes switch on for a GPU."""
    torch.manual_seed(0)
    yield
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the host raises RuntimeError where it would wait for the GPU."""

    @contextlib.contextmanager
    def forbid() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbid
