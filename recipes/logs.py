"""The log of a run, JSON by lines: a header, what the run yields, and at the end the seconds."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recipes.recipe import Line

__all__ = ["read", "record"]


def record(
    path: Path, header: dict[str, Any], lines: Iterable[Line], report: Callable[[Line], None]
) -> None:
    """Log a run while it goes; `report` sees every line too."""
    start = time.perf_counter()
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for line in lines:
            file.write(json.dumps(line) + "\n")
            report(line)
        file.write(json.dumps({"seconds": round(time.perf_counter() - start, 2)}) + "\n")


def read(path: Path, **expected: Any) -> dict[str, Any] | None:
    """A finished run: its header, `seconds`, and a column per logged name.

    None if there is no log, if it ends early, or if its header differs from what is expected.
    """
    try:
        header, *lines, end = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    except (FileNotFoundError, ValueError):  # none, empty, or cut off within a line
        return None
    if "seconds" not in end or any(header[name] != value for name, value in expected.items()):
        return None
    return {**header, **end, **{name: [line[name] for line in lines] for name in lines[0]}}
