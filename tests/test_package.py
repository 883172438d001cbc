"""The package as a whole: what it ships, what it imports, what it documents."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import torchpisa

griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "torchpisa"
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

# Which rooms of the package a room may import, besides itself.
MAY_IMPORT = {
    "algorithms": set(),
    "checks": set(),
    "penalty": {"checks"},
    "data": set(),
    "state_keys": set(),
    "torch_private": set(),
    "preconditioners": {"algorithms", "checks"},
    "kernels": {"algorithms", "preconditioners", "state_keys", "torch_private", "distributed"},
    "optim": {
        *("algorithms", "preconditioners", "kernels", "penalty", "checks"),
        *("state_keys", "torch_private", "distributed"),
    },
    "distributed": {"algorithms", "kernels", "optim", "state_keys", "torch_private"},
    "diagnostics": {"kernels", "optim", "distributed", "preconditioners", "checks", "state_keys"},
    "tuning": {"checks", "diagnostics", "optim"},
    "theory": {"algorithms", "preconditioners", "optim", "checks"},
    "federated": {"algorithms", "preconditioners", "penalty", "data", "checks"},
    "presets": {"checks", "penalty"},
    "registry": {"checks", "optim", "presets"},
    "integrations": {"checks", "diagnostics", "optim", "registry"},
    "__init__": {"optim", "registry"},
}
INTERNAL = {"checks", "kernels", "state_keys", "torch_private"}  # not of the public interface
# All that what distributed/ builds on may import from it: what is known of sharded tensors and of
# who does what to whole matrices and, where a process group is given, what implements the
# optimizers' `Peers`.
UNDER_DISTRIBUTED = {
    "kernels": {"dtensor", "owners"},
    "optim": {"dtensor", "owners", "process_group"},
}
# Modules of kernels/triton that do without Triton.
WITHOUT_TRITON = {"kernels.triton", "kernels.triton.plan", "kernels.triton.table"}
# Folders that need optional packages: they may import them, and are imported only when needed.
NEEDS = {
    "kernels/triton": {"triton"},
    "federated/flower": {"flwr", "httpx", "numpy", "uvicorn"},
    "integrations": {"accelerate", "lightning", "tianshou", "timm", "transformers"},
}

Member = Any  # griffe.Object | griffe.Alias


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (path,) = folder.glob("torchpisa-*.whl")
    return path


def test_wheel_holds_the_package_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"torchpisa"}
    expected = {f"torchpisa/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert "torchpisa/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


ALONE = """
import importlib.metadata, importlib.resources, sys

wheel, site, *others = sys.argv[1:]
sys.modules.update(dict.fromkeys(others))  # importing them raises from here on
sys.path += [wheel, site]
import torch
import torchpisa

assert torchpisa.__file__.startswith(wheel)
assert torchpisa.__version__ == importlib.metadata.version("torchpisa")
assert importlib.resources.files("torchpisa").joinpath("py.typed").is_file()
assert all(isinstance(c, type) for c in (torchpisa.PISA, torchpisa.NSISA, torchpisa.MISA))

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
before = [p.detach().clone() for p in model.parameters()]
opt = torchpisa.SISA(model.parameters())
model(torch.randn(5, 3)).square().mean().backward()
opt.step()
for old, new in zip(before, model.parameters()):
    assert new.isfinite().all() and not torch.equal(old, new)
"""


def needed_by(distribution: str) -> set[str]:
    """The distribution and what it needs, and what that needs, as far as it is installed."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in found:
            found.add(name)
            needed = [line for line in requirements if "extra ==" not in line]
            waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed]
    return found


def test_wheel_works_with_torch_alone(wheel: Path, tmp_path: Path) -> None:
    """Nothing that torch does not need itself can be imported."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq")
    run(*pip, "--no-deps", "--no-index", "--target", tmp_path, wheel)
    (meta,) = tmp_path.glob("torchpisa-*.dist-info")
    requires = metadata.Distribution.at(meta).requires or []
    assert [line for line in requires if "extra ==" not in line] == ["torch>=2.6"]
    names = needed_by("torch")
    others = [
        module
        for module, owners in metadata.packages_distributions().items()
        if module != "torchpisa"  # a checkout may be installed
        and not names & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
    ]
    assert {"numpy", "matplotlib", "rich", "pytest"} <= set(others)
    site = Path(metadata.distribution("torch").locate_file("")).resolve()
    run(sys.executable, "-I", "-S", "-c", ALONE, tmp_path, site, *others)


# The direction of imports


def rooms() -> set[str]:
    return {path.stem for path in SOURCE.iterdir() if path.suffix == ".py"} | {
        path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()
    }


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every module a file imports: its full name, the line, whether at module level."""
    package = ["torchpisa", *path.relative_to(SOURCE).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for_checkers_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if node in for_checkers_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            # `from torchpisa import x` names the room in x.
            names = [module]
            if module in {"torchpisa", "torchpisa.distributed"}:
                names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, node not in inside


def test_every_room_has_its_rule() -> None:
    assert rooms() == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_import_direction(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py")) or [SOURCE / f"{room}.py"]
    wrong = []
    for path in files:
        for name, line, at_module_level in imports(path):
            top, _, rest = name.partition(".")
            folder = path.parent.relative_to(SOURCE).as_posix()
            if top == "torchpisa":
                other, _, module = rest.partition(".")
                allowed = other in MAY_IMPORT[room] | {room}
                if other == "distributed" and room in UNDER_DISTRIBUTED:
                    allowed = module in UNDER_DISTRIBUTED[room]
                for special in NEEDS:
                    if (
                        rest not in WITHOUT_TRITON
                        and rest.startswith(special.replace("/", "."))
                        and folder != special
                    ):
                        allowed = allowed and not at_module_level
            elif top in {"torch"} | NEEDS.get(folder, set()) or top in sys.stdlib_module_names:
                allowed = True
            else:  # optional packages, inside the function that needs them
                allowed = not at_module_level and room != "algorithms"
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_import_leaves_triton_alone() -> None:
    run(sys.executable, "-c", "import sys, torchpisa; assert 'triton' not in sys.modules")


LAZY = """
import sys, torchpisa

assert "torchpisa.tuning" not in sys.modules and "torchpisa.federated" not in sys.modules
assert callable(torchpisa.tuning.calibrate) and torchpisa.data and torchpisa.federated
assert callable(torchpisa.distributed.attach) and callable(torchpisa.distributed.save)
assert callable(torchpisa.integrations.accumulation.MicroBatchHooks)
assert dir(torchpisa) == sorted([*torchpisa.__all__, *torchpisa._SUBMODULES])
for module in (torchpisa, torchpisa.integrations):
    try:
        module.nothing
    except AttributeError as error:
        assert "no attribute 'nothing'" in str(error)
"""


def test_submodules_load_when_named() -> None:
    run(sys.executable, "-c", LAZY)


def test_all_public_submodules_are_listed() -> None:
    assert set(torchpisa._SUBMODULES) == rooms() - INTERNAL - {"__init__"}
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    for_checkers = [
        alias.asname
        for branch in tree.body
        if isinstance(branch, ast.If)
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    ]
    assert for_checkers == list(torchpisa._SUBMODULES)
    bridges = {path.stem for path in (SOURCE / "integrations").glob("[!_]*.py")}
    assert bridges == set(torchpisa.integrations._MODULES)


# What a type checker tells users

TYPED = """
import torch
import torchpisa
from torchpisa import MISA, SISA
from torchpisa.tuning import calibrate


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    return output.square().mean()


model = torch.nn.Linear(2, 2)
data = [torch.randn(4, 2) for _ in range(8)]
SISA(model.parameters(), **calibrate(model, loss, data))
torch.optim.lr_scheduler.CosineAnnealingLR(torchpisa.create("misa", model, lr=1e-3), T_max=9)
MISA(torchpisa.optim.param_groups.split(model))
"""

MISTYPED = """
torchpisa.creat("misa", model)  # maybe "create"?
torchpisa.tunin.calibrate(model, loss, data)  # no attribute "tunin"
torchpisa.tuning.calibrat(model, loss, data)  # maybe "calibrate"?
MISA(model)  # Argument 1 to "MISA"
MISA(model.parameters(), betas=(0.9, 0.999))  # Unexpected keyword argument "betas"
"""


def test_type_checkers_know_what_users_call(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(TYPED + MISTYPED, encoding="utf-8")
    report, problems, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), str(program)])
    errors = [line for line in report.splitlines() if ": error:" in line]
    expected = [line.partition("  # ")[2] for line in MISTYPED.strip().splitlines()]
    assert len(errors) == len(expected), report + problems
    assert all(text in error for text, error in zip(expected, errors, strict=True)), report


# The documentation of what is public


@pytest.fixture(scope="module")
def package() -> Member:
    return griffe.load("torchpisa", search_paths=[ROOT / "src"], resolve_aliases=True)


def public_modules(module: Member) -> Iterator[Member]:
    """The modules under `module`; a subpackage with `__all__` lists the public ones there."""
    yield module
    listed = None if module.path == "torchpisa" else module.exports
    for name, child in module.modules.items():
        if listed is None:
            public = not (child.is_alias or name.startswith("_") or name in INTERNAL)
        else:
            public = name in map(str, listed)
        if public:
            yield from public_modules(child)


def documented(package: Member) -> set[str]:
    """The canonical paths that the directives of the API pages show."""
    shown = set()
    for page in API_PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^::: (\S+)\n((?:[ ]+.*\n|\n)*)", text, re.MULTILINE):
            target = package[match[1].removeprefix("torchpisa.")]
            shown.add(target.canonical_path)
            if target.is_module:
                listed = re.findall(r"^ +- (\w+)$", match[2], re.MULTILINE)
                names = listed or [name for name, m in target.members.items() if m.is_public]
                shown |= {target[name].canonical_path for name in names}
    return shown


def test_public_names_are_documented(package: Member) -> None:
    shown = documented(package)
    public = [
        module[name]
        for module in public_modules(package)
        for name in map(str, module.exports or ())
        if name != "__version__"
    ]
    assert {"PISA", "SISA", "NSISA", "MISA"} <= {member.name for member in public}
    without_docstring = {m.path for m in public if not m.has_docstring}
    assert not without_docstring, f"no docstring: {sorted(without_docstring)}"
    missing = {m.path for m in public if not m.is_module and m.canonical_path not in shown}
    assert not missing, f"on no page of docs/api: {sorted(missing)}"


# The repository


def test_files_are_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    paths = [ROOT / name for name in listing.split("\0") if name]
    large = [p.relative_to(ROOT).as_posix() for p in paths if p.exists() and p.stat().st_size > 1e6]
    assert not large, f"1 MB or more: {large}"
