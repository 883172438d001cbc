"""Results that a command has saved as JSON."""

import json
from pathlib import Path
from typing import Any

__all__ = ["read_saved"]


def read_saved(argument: str, file: Path, command: str, **entries: type) -> dict[str, Any]:
    """Return the results that a command has saved.

    Args:
        argument: the argument that names the file, for errors.
        file: the file.
        command: the command that writes such files, for errors.
        **entries: what they hold, with its type.

    Raises:
        ValueError: it is not such a file.
    """
    problem = f"{argument} must be written by {command}, got {file}"
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{problem}: {error}") from None
    for name, kind in entries.items():
        if not isinstance(results, dict) or not isinstance(results.get(name), kind):
            raise ValueError(f"{problem}, which has no {name}")
    return results
