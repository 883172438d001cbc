"""The tests mirror the package: what src/torchpisa/x/y.py does is tested in tests/x/test_y.py.

tests/x/test_y.py may also be named after a package src/torchpisa/x/y, for all of its modules.
"""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "torchpisa"

# Modules without a file of their name, and the file that tests them.
ELSEWHERE = {
    # Seen only through what calls them, which compares whole runs.
    "algorithms/misa.py": "optim/test_misa.py",
    "federated/durable_files.py": "federated/flower/test_durable_files.py",
    "federated/clients/cuda_graphs.py": "federated/test_gpu.py",
    "federated/clients/data.py": "federated/test_simulation.py",
    "federated/clients/local_round.py": "federated/test_algorithms.py",
    "federated/clients/objective.py": "federated/test_simulation.py",
    "federated/clients/sequential.py": "federated/test_simulation.py",
    "federated/progress_bar.py": "federated/test_simulation.py",
    "federated/flower/aggregation.py": "federated/flower/test_strategy.py",
    "federated/flower/client.py": "federated/flower/test_strategy.py",
    "federated/flower/mods.py": "federated/flower/test_privacy.py",
    "federated/trust/ledger.py": "federated/flower/test_attacks.py",
    "federated/flower/records.py": "federated/flower/test_screen.py",
    "kernels/dispatch.py": "kernels/test_versions.py",
    "kernels/optional.py": "kernels/test_triton.py",
    "kernels/resolvent.py": "preconditioners/test_spectral.py",
    "optim/accumulated.py": "integrations/test_accumulation.py",
    "theory/blocks.py": "theory/test_spectral.py",
    "theory/statements.py": "theory/test_certificate.py",
    "theory/trajectory.py": "theory/test_certificate.py",
    "tuning/loss_trend.py": "tuning/test_finder.py",
    "tuning/plot.py": "tuning/test_finder.py",
    # What all of a folder is compared with, or built on.
    "kernels/loop.py": "kernels/test_foreach.py",
    "preconditioners/base.py": "preconditioners/test_reductions.py",
    "preconditioners/identity.py": "preconditioners/test_reductions.py",
    "preconditioners/newton_schulz.py": "preconditioners/test_reductions.py",
    "preconditioners/second_moment.py": "preconditioners/test_reductions.py",
    "presets.py": "test_registry.py",
    "state_keys.py": "optim/test_state.py",
    # Interfaces to others, which are there in the tests of those.
    "distributed/dtensor.py": "distributed/test_fsdp.py",
    "optim/peers.py": "distributed/test_process_group.py",
    "torch_private.py": "optim/test_traced.py",
}

# Files about something that no module does alone.
TOGETHER = {
    "diagnostics/test_disagreement.py": "a warning, on real data",
    "diagnostics/test_processes.py": "diagnostics of many ranks",
    "distributed/test_elastic.py": "ranks that are killed",
    "distributed/test_page.py": "the page about distributed training",
    "federated/algorithms/test_rivals.py": "rivals against their transcriptions",
    "federated/flower/test_attacks.py": "participants who lie",
    "federated/flower/test_deployment.py": "real processes",
    "federated/flower/test_durable_files.py": "what is on disk, of clients and servers",
    "federated/flower/test_engine.py": "Flower's simulation",
    "federated/flower/test_guide.py": "the page from data to a deployment",
    "federated/flower/test_imports.py": "without Flower",
    "federated/flower/test_late.py": "answers that are late",
    "federated/flower/test_recovery.py": "participants who are killed",
    "federated/flower/test_privacy.py": "privacy of real clients",
    "federated/flower/test_secure_aggregation.py": "what Flower has of it",
    "federated/trust/test_page.py": "the page about trust",
    "federated/test_largest_sigma.py": "penalties at the end of their range",
    "kernels/test_range.py": "likewise, in every kernel",
    "kernels/test_versions.py": "what autograd hears of, from every kernel",
    "kernels/test_waiting.py": "devices that no kernel waits for",
    "optim/test_absent.py": "batches that are skipped, in every optimizer",
    "optim/test_failed_step.py": "a step that raises, in every optimizer",
    "optim/test_stages.py": "stages of the consensus, in MISA",
    "preconditioners/test_reductions.py": "what preconditioners have in common",
    "test_defaults.py": "how good the defaults are",
    "test_docs.py": "the blocks of the documentation",
    "test_mirror.py": "this",
    "test_notebooks.py": "the notebooks of the documentation",
    "test_package.py": "the package as a whole",
    "test_pages.py": "tables of the documentation",
    "test_release.py": "the files of a release",
    "test_site.py": "the documentation in a browser",
    "theory/test_spectral.py": "certificates of Spectral",
}

MODULES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)
FILES = sorted(
    path.relative_to(TESTS).as_posix()
    for folder in ["", *(path.name for path in PACKAGE.iterdir() if path.is_dir())]
    for path in (TESTS / folder).glob("**/test_*.py" if folder else "test_*.py")
)


def candidates(module: str) -> list[str]:
    """Return the names that the tests of a module may have: its own, and those of its packages."""
    path = Path(module)
    names = [path.with_suffix(""), *path.parents[:-2]]
    return [name.with_name(f"test_{name.name}.py").as_posix() for name in names]


def test_every_module_has_a_file() -> None:
    named = {module for module in MODULES if any((TESTS / n).is_file() for n in candidates(module))}
    alone = set(MODULES) - named
    assert alone <= ELSEWHERE.keys(), "give them a test file of their name, or say where they are"
    assert ELSEWHERE.keys() <= alone, "these need not be listed"
    assert all((TESTS / file).is_file() for file in ELSEWHERE.values())


def test_every_file_has_a_module() -> None:
    known = {name for module in MODULES for name in candidates(module)}
    strange = {file for file in FILES if file not in known and not file.endswith("test_gpu.py")}
    assert strange <= TOGETHER.keys(), "name them after what they test, or say what they are about"
    assert TOGETHER.keys() <= strange, "these need not be listed"
