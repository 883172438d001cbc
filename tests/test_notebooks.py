"""Notebooks: kept without outputs, executed for the site, and what they say is so."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@every_notebook
def test_nothing_is_kept_of_an_execution(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@every_notebook
def test_is_a_page_of_the_site(path: Path) -> None:
    assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all cells in this process, and return their variables."""
    pytest.importorskip("sklearn")
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells(path, "code")):
        exec(compile("".join(cell["source"]), f"{path.name}, code {number}", "exec"), namespace)
    return namespace


def test_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first paragraph says that MISA is ahead, by defaults and by the best of three rates."""
    found = run("swap", monkeypatch)
    assert found["misa"][-1] < found["adamw"][-1]
    best = {name: min(by_rate.values()) for name, by_rate in found["losses"].items()}
    assert best["MISA"] < best["AdamW"]


def test_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """MISA gets further than FedAvg in as many rounds, with as many sample gradients and bytes."""
    runs = run("clients", monkeypatch)["runs"]
    misa, fedavg = runs["MISA"][-1], runs["FedAvg"][-1]
    assert misa["accuracy"] > fedavg["accuracy"]
    for cost in ("round", "samples", "bytes_up", "bytes_down"):
        assert misa[cost] == fedavg[cost]


# The hook that executes them for the site


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    for package in ("mkdocs", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    source = ROOT / "docs" / "_hooks" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(path: Path, *codes: str) -> Path:
    """A notebook of a title and some cells of code."""
    from nbformat import v4, write

    title = v4.new_markdown_cell("# Title\n\nWords.")
    write(v4.new_notebook(cells=[title, *map(v4.new_code_cell, codes)]), path)
    return path


def test_page_has_outputs_and_badges(hook: ModuleType, tmp_path: Path) -> None:
    path = notebook(tmp_path / "some.ipynb", "x = 6", "print(7 * x)\nx + 1")
    page = hook.page(path, "https://github.com/owner/name")
    assert page.startswith('# Title\n\n<span class="badge">executed with torchpisa ')
    assert "[download the notebook](some.ipynb)" in page
    assert "/github/owner/name/blob/" in page
    assert "```python\nprint(7 * x)\nx + 1\n```\n\n```text\n42\n```\n\n```text\n7\n```" in page


def test_no_repository_no_link_to_it(hook: ModuleType) -> None:
    assert "olab" not in hook.badges("some.ipynb", None)


def test_a_cell_that_raises_ends_the_build(hook: ModuleType, tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    path = notebook(tmp_path / "some.ipynb", "1 / 0")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        hook.page(path, None)
