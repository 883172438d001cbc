"""A release: its workflows run what developers run, and its versions agree."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchpisa

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(*parts: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(*parts).read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def commands(path: Path) -> Iterator[str]:
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        for step in job.get("steps", ()):
            yield from step.get("run", "").splitlines()


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} == {"ci", "docs", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has(path):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    found = [line for line in commands(path) if not line.startswith("git config ")]
    assert found
    for line in found:
        program, target, *_ = line.split()
        assert program == "make", line
        assert target in targets, line


def test_workflows_fit_their_schema():
    checker = Path(sys.executable).with_name("check-jsonschema")
    if not checker.exists():
        pytest.skip("check-jsonschema is not installed")
    command = [checker, "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_oldest_and_newest_are_tested():
    classifiers = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line
    ]
    jobs = read(".github", "workflows", "ci.yml")["jobs"]
    setup = next(step for step in jobs["oldest"]["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["with"]["python-version"] == classifiers[0] == PROJECT["requires-python"][2:]
    assert jobs["newest"]["strategy"]["matrix"]["python"][-1] == classifiers[-1]
    lowest = PROJECT["dependencies"][0].removeprefix("torch>=")
    assert pins("constraints-oldest.txt")["torch"] == f"{lowest}.0"


def test_pre_commit_has_the_pinned_tools():
    pinned = pins("constraints.txt")
    revisions = {
        repo["repo"].rpartition("/")[2]: repo["rev"].removeprefix("v")
        for repo in read(".pre-commit-config.yaml")["repos"]
    }
    assert revisions["ruff-pre-commit"] == pinned["ruff"]
    assert revisions["check-jsonschema"] == pinned["check-jsonschema"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("tag", "fits"),
    [(f"v{torchpisa.__version__}", True), (torchpisa.__version__, False), ("v9.9.9", False)],
)
def test_tag_is_the_version(tag, fits):
    done = subprocess.run(
        ["make", "tag-check", f"TAG={tag}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode == 0) == fits, done.stdout
    assert fits or f"the tag is '{tag}', the version {torchpisa.__version__}" in done.stdout


def test_citation():
    citation = read("CITATION.cff")
    assert citation["version"] == torchpisa.__version__
    assert citation["preferred-citation"]["doi"] == "10.1038/s42256-026-01182-3"
    assert citation["preferred-citation"]["doi"] in PROJECT["urls"]["Paper"]
    (preprint,) = citation["references"]
    assert preprint["identifiers"][0]["value"] == "arXiv:2502.10784"
