"""Versions and hardware, which a result depends on besides its script."""

import os
import platform
import sys
from importlib import metadata

import torch

import torchpisa

__all__ = ["device_name", "hardware", "versions"]


def versions(*others: str) -> dict[str, str]:
    """Return the versions of Python, torch, torchpisa, triton and `others`, if installed."""
    installed = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchpisa": torchpisa.__version__,
    }
    for name in ("triton", *others):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a source folder on the path has no metadata
            if name in sys.modules:
                installed[name] = getattr(sys.modules[name], "__version__", "unknown")
    return installed


def hardware(device: str) -> dict[str, str | int | None]:
    """Return GPU (None on a CPU), CPU and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = device_name(device) if device.startswith("cuda") else None
    return {"gpu": gpu, "cpu": device_name("cpu"), "cores": cores}


def device_name(device: str) -> str:
    """Return the name of a GPU or CPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line for line in file if line.startswith("model name")).split(": ")[1][:-1]
    except (OSError, StopIteration, IndexError):  # not Linux, or not a PC
        return platform.processor() or platform.machine()
