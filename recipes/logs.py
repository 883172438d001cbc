"""The log of a run as JSON lines: a header, what the run yields, and the seconds at the end."""

import contextlib
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

from recipes.recipe import Line

__all__ = ["TensorBoardLog", "read", "record", "reserved"]


def record(
    path: Path, header: dict[str, Any], lines: Iterable[Line], report: Callable[[Line], None]
) -> None:
    """Log a run while it runs, every line at once; `report` receives it, too."""
    start = time.perf_counter()
    with path.open("w", buffering=1, encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for line in lines:
            file.write(json.dumps(line) + "\n")
            report(line)
        file.write(json.dumps({"seconds": round(time.perf_counter() - start, 2)}) + "\n")


@contextlib.contextmanager
def reserved(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Keep other commands from doing runs, as long as this process is alive and in the context.

    The system drops the locks when the process ends, however it ends. Windows, and file systems
    without locks, keep nobody away.

    Args:
        folder: the folder of the logs.
        names: the names of the runs. Each locks one byte of a file beside the folder.

    Raises:
        BlockingIOError: another command is doing one of them.
    """
    with folder.with_name(f".{folder.name}.lock").open("ab") as file:
        for name in names if fcntl is not None else ():
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(name.encode()))
            except (BlockingIOError, PermissionError):
                raise BlockingIOError(
                    f"{folder / name}.jsonl is being written by another command. Wait for its end, "
                    "or choose other runs with --only or another folder with --out"
                ) from None
            except OSError:  # no locks here
                break
        yield


def read(path: Path, **expected: Any) -> dict[str, Any] | None:
    """Return a finished run: its header, `seconds`, and a column per logged name.

    None if there is no log, if it ends early, or if its header differs from what is expected.
    """
    try:
        header, *lines, end = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    except (FileNotFoundError, ValueError):  # no file, an empty one, or one cut off within a line
        return None
    if "seconds" not in end or any(header[name] != value for name, value in expected.items()):
        return None
    return {**header, **end, **{name: [line[name] for line in lines] for name in lines[0]}}


class TensorBoardLog:
    """TensorBoard's files of a run, written beside its log; a context manager.

    Curves are drawn against the first column of a line. What an earlier attempt at the same run
    left in the folder is removed.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(str(folder))

    def __call__(self, line: Line) -> None:
        (_, step), *columns = line.items()
        for name, value in columns:
            if value is not None:
                self.writer.add_scalar(name, value, int(step or 0))

    def __enter__(self) -> "TensorBoardLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.close()
