"""What a result depends on besides its script: versions and hardware."""

import os
import platform
import sys
from importlib import metadata

import torch

import torchpisa

__all__ = ["device_name", "hardware", "versions"]


def versions(*others: str) -> dict[str, str]:
    """Versions of Python, torch, torchpisa and triton, and of `others` where they are there."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchpisa": torchpisa.__version__,
    }
    for name in ("triton", *others):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a source folder on the path has no metadata
            if name in sys.modules:
                found[name] = getattr(sys.modules[name], "__version__", "unknown")
    return found


def hardware(device: str) -> dict[str, str | int | None]:
    """GPU (None on a CPU), CPU and the cores that this process may use."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = device_name(device) if device.startswith("cuda") else None
    return {"gpu": gpu, "cpu": device_name("cpu"), "cores": own}


def device_name(device: str) -> str:
    """Name of the GPU or CPU that `device` is."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line for line in file if line.startswith("model name")).split(": ")[1][:-1]
    except (OSError, StopIteration, IndexError):  # not Linux, or not a PC
        return platform.processor() or platform.machine()
