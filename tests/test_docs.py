"""Every Python block of the README and of the documentation runs; every formula shows.

The blocks of one file share a namespace and run in order. A block that cannot run (it needs a GPU,
a download, a name the reader supplies) has the line `<!-- notest -->` right before its fence.
"""

import importlib.util
import re
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})python\b[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
# What `make venv` installs and the oldest supported Python and torch go without.
OPTIONAL = {"accelerate", "flwr", "gymnasium", "lightning", "peft", "tianshou", "transformers"}
SKIPPED = re.compile(r"<!-- notest -->\s*\Z")


class Block(NamedTuple):
    line: int  # of its first line of code, counted from 1
    code: str


def blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, match.start("code")) + 1, textwrap.dedent(match["code"]))
        for match in FENCE.finditer(text)
        if not SKIPPED.search(text, 0, match.start())
    ]


def run(path: Path, namespace: dict[str, Any]) -> None:
    for line, code in blocks(path.read_text(encoding="utf-8")):
        try:
            # The empty lines make the line numbers of tracebacks those of the file.
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in OPTIONAL:
                raise
            pytest.skip(f"{path.name} needs {package}")
        except Exception as error:
            where = f"{path.name}:{line}"
            raise AssertionError(f"the block at {where} raised {error!r}") from error


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's
    "ignore:.*many workers",
    "ignore:The epoch parameter in",  # of SequentialLR in torch 2.6
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(path, {"__name__": "__main__"})


def test_failing_block_is_located(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\nx = 1\n```\n\n<!-- notest -->\n```python\nno_such_name\n```\n\n"
        '!!! note\n\n    ```python title="in a note"\n    y = x\n    y / 0\n    ```\n'
    )
    with pytest.raises(AssertionError, match=r"page\.md:15 raised ZeroDivisionError") as caught:
        run(page, {})
    cause = caught.value.__cause__
    assert cause is not None
    assert traceback.extract_tb(cause.__traceback__)[-1].lineno == 16


@pytest.fixture(scope="module")
def mathml() -> ModuleType:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("mathml", ROOT / "docs" / "_hooks" / "mathml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formula_becomes_mathml(mathml: ModuleType) -> None:
    formula = mathml.to_mathml(r"\begin{aligned} \mathbf{w} &= \pi_i \\ x &< y \end{aligned}")
    assert formula.count("<mtr>") == 2
    assert "<mi>\U0001d430</mi>" in formula
    assert "<msub><mi>π</mi><mi>i</mi></msub>" in formula
    assert "<mo>&lt;</mo>" in formula


@pytest.mark.parametrize(
    ("latex", "message"),
    [
        (r"\nosuchcommand x", "unsupported command '.nosuchcommand'"),
        (r"\begin{gather} a \end{gather}", "unsupported environment 'gather'"),
        (r"a & b", "misplaced '&'"),
        (r"a \\ b", "outside an environment"),
        (r"\frac{a", "unbalanced braces"),
        (r"\frac a", "mfrac"),
        (r"x_", "MissingSuperScriptOrSubscript"),
    ],
)
def test_unsupported_formula_is_refused(mathml: ModuleType, latex: str, message: str) -> None:
    with pytest.raises(mathml.UnsupportedError, match=message):
        mathml.to_mathml(latex)
