"""The benchmark of a step: its shapes, what it saves and prints, and rows that fail."""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchpisa
from benchmarks import __main__ as command
from benchmarks import federated, rows, step, step_figure, stopwatch
from benchmarks.rows import Row
from benchmarks.shapes import MODELS, parameters
from benchmarks.stopwatch import Problem
from recipes.datasets import Dataset, Split

GIVEN = {"sigma": 0.5, "rho": 1e3}  # without them sigma is state, which counts in a tiny model
DEFAULTS = Row("torchpisa", "SISA", "defaults", GIVEN, moved=28.0)
ROUND = Row("torchpisa", "SISA", "m=4", {"batches": 4, **GIVEN}, period=4, moved=30.0)
MATRICES = Row("torchpisa", "NSISA", kinds=rows.KERNELS)
BROKEN = Row("torchpisa", "SISA", "broken", {"sigma": -1.0})

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")

Measure = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _small_and_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(step, "COPY_BYTES", {"cpu": 2**20})
    threads = torch.get_num_threads()
    gc.freeze()  # garbage is collected after every row: not among all objects of the session
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    def run(*members: list[Row], options: tuple[object, ...] = ("--no-peers",)) -> dict[str, Any]:
        monkeypatch.setattr(rows, "TORCHPISA_ROWS", list(members))
        path = tmp_path / "tiny.json"
        common = ("--device", "cpu", "--model", "tiny", "--repeats", 3, "--threads", 1)
        step.main([str(word) for word in (*common, "--save", path, *options)])
        result: dict[str, Any] = json.loads(path.read_text())
        result["by_name"] = {row["name"]: row for row in result["rows"]}
        return result

    return run


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-1.5b", 1_557_611_200),
        ("resnet34", 21_797_672),
        ("lstm", 24_221_600),
        ("tiny", 7_360),
    ],
)
def test_shapes_are_those_of_the_model(model: str, count: int) -> None:
    shapes = MODELS[model]()
    assert parameters(shapes) == count
    assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in shapes:
        dims = {"vector": 1, "kernel": 4}.get(shape.kind, 2)
        assert len(shape.size) == dims, shape


def test_small_gpt2_has_50_million() -> None:
    assert parameters(MODELS["gpt2-50m"]()) == pytest.approx(50e6, rel=0.02)


@needs_muon
def test_rows_are_saved_and_printed(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure([DEFAULTS, BROKEN], [ROUND], [MATRICES])
    config = result["config"]
    assert config["parameters"] == 7360
    assert {name: config[name] for name in ("model", "device", "dtype", "repeats", "threads")} == {
        **{"model": "tiny", "device": "cpu", "dtype": "float32", "repeats": 3, "threads": 1}
    }
    assert {"python", "torch", "torchpisa"} <= set(result["versions"])
    assert result["hardware"]["gpu"] is None
    assert result["hardware"]["cores"] >= 1
    assert result["copy_gb_per_s"] > 0

    by_name = result["by_name"]
    names = [row.name for row in (DEFAULTS, BROKEN, ROUND, MATRICES)]
    assert list(by_name) == [*step.REFERENCES, *names]
    assert "sigma" in by_name[BROKEN.name]["error"]
    assert "ms" not in by_name[BROKEN.name]
    lines = capsys.readouterr().out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("optimizer"))
    for column in step.COLUMNS:
        assert column in lines[top]
    printed = lines[top + 1 : top + 1 + len(by_name)]
    for line, row in zip(printed, result["rows"], strict=True):
        assert line.startswith(row["name"])
        assert (row["error"] or f" {row['ms']:.3f} ") in line


@needs_muon
def test_numbers_fit_together(measure: Measure) -> None:
    by_name = measure([DEFAULTS], [ROUND], [MATRICES])["by_name"]
    fused, foreach, muon = step.REFERENCES
    for row in by_name.values():
        assert row["error"] is None
        assert 0 < min(row["samples_ms"]) <= row["ms"] <= max(row["samples_ms"])
        assert 0 <= row["iqr_ms"] <= max(row["samples_ms"]) - min(row["samples_ms"]) + 1e-4
        assert {fused, foreach} <= set(row["ratios"])
        assert (muon in row["ratios"]) == ("vector" not in row["kinds"])
        for name, ratio in row["ratios"].items():
            assert ratio == pytest.approx(row["ms"] / row["beside_ms"][name], rel=1e-3)
    for name in step.REFERENCES:
        assert by_name[name]["ratios"][name] == 1
    assert len(by_name[fused]["samples_ms"]) == 9  # beside each of three sets
    assert len(by_name[muon]["samples_ms"]) == 3  # beside the one of matrices

    default, round_of_four = by_name[DEFAULTS.name], by_name[ROUND.name]
    assert default["gb_per_s"] == pytest.approx(28 * 7360 / default["ms"] / 1e6, rel=1e-3)
    assert default["steps_per_sample"] == 1
    assert round_of_four["steps_per_sample"] == 4
    assert round_of_four["state_bytes_per_parameter"] == pytest.approx(36, abs=0.1)
    assert default["state_bytes_per_parameter"] == pytest.approx(8, abs=0.1)
    assert by_name[muon]["state_bytes_per_parameter"] == 4
    assert by_name[MATRICES.name]["parameters"] == by_name[muon]["parameters"] == 2 * 12 * 16**2
    assert by_name[MATRICES.name]["copy_share"] is None
    assert by_name[fused]["temporary_share"] < 0.1
    assert by_name[foreach]["temporary_share"] > 0.9


def test_settings_of_our_rows_exist() -> None:
    for row in (row for members in rows.TORCHPISA_ROWS for row in members):
        arguments = signature(getattr(torchpisa, row.optimizer)).parameters
        assert set(row.settings) <= set(arguments), row.name


def test_bytes_that_must_move() -> None:
    moved = {row.name: row.moved for members in rows.TORCHPISA_ROWS for row in members}
    for label in ("fused", "foreach", "defaults"):
        assert moved[f"torchpisa SISA, {label}"] == rows.ADAMW_BYTES == 28
    assert moved["torchpisa SISA, fused, m=4"] == (24 + 28 + 28 + 28 + 12) / 4
    assert moved["torchpisa SISA, fused, bfloat16 state"] == 20
    assert moved["torchpisa NSISA, defaults"] is None


@needs_muon
def test_absent_libraries_are_said(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("pytorch_optimizer")
    library.AdamW = torch.optim.AdamW
    absent = "dion", "emerging_optimizers", "gram_newton_schulz", "heavyball", "muon", "optimuon"
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", library)
    by_name = measure(options=("--only", "AdamW", "Muon"))["by_name"]
    errors = {name: row["error"] for name, row in by_name.items() if row["error"]}
    assert errors == {
        "dion Muon": "dion is not installed",
        "dion NorMuon": "dion is not installed",
        "gram_newton_schulz Muon": "gram_newton_schulz is not installed",
        "gram_newton_schulz Muon, without its kernels": "gram_newton_schulz is not installed",
        "muon SingleDeviceMuon": "muon is not installed",
        "pytorch_optimizer Muon, on the short side": "pytorch_optimizer has no Muon",
        "pytorch_optimizer NorMuon": "pytorch_optimizer has no NorMuon",
        "emerging_optimizers Muon, symmetric products": "emerging_optimizers is not installed",
        "emerging_optimizers AdaptiveMuon, NorMuon": "emerging_optimizers is not installed",
        "optimuon Muon": "optimuon is not installed",
        "optimuon Muon, NorMuon": "optimuon is not installed",
        "heavyball AdamW": "heavyball is not installed",
        "heavyball Muon": "heavyball is not installed",
        "pytorch_optimizer AdamW": "pytorch_optimizer.AdamW is torch.optim's",
        "pytorch_optimizer Muon": "pytorch_optimizer has no Muon",
    }
    assert set(by_name) - set(errors) == set(step.REFERENCES)


def test_long_warm_up_and_late_failure_end_their_rows_only(measure: Measure) -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps > 5:
                raise RuntimeError("too late\nand a second line")

    def sleep(*_: object) -> torch.optim.Optimizer:
        for _ in range(300):
            time.sleep(0.01)
        raise AssertionError("nobody stopped it")

    def late(row: Row, named: rows.Named, compiled: bool) -> torch.optim.Optimizer:
        return Late([param for _, param in named])

    members = [Row("x", "Slow", make=sleep), Row("x", "Late", make=late), DEFAULTS]
    by_name = measure(members, options=("--no-peers", "--cap", 1))["by_name"]
    assert by_name["x Slow"]["error"] == "warm-up took over 1 s"
    assert by_name["x Late"]["error"] == "RuntimeError: too late"
    assert by_name[DEFAULTS.name]["error"] is None


def test_without_compiling_if_that_fails(measure: Measure) -> None:
    def make(row: Row, named: rows.Named, compiled: bool) -> torch.optim.Optimizer:
        if compiled:
            raise RuntimeError("no compiler")
        return torch.optim.SGD([param for _, param in named], lr=0.0)

    by_name = measure([Row("x", "Lazy", make=make, compiles=True)])["by_name"]
    assert by_name["x Lazy"]["error"] is None
    assert by_name["x Lazy"]["note"] == "not compiled (compiled: RuntimeError: no compiler)"


def test_a_row_that_fails_leaves_alone_what_others_compiled(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))

    class Compiled(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            events.append("step")

    def make(row: Row, named: rows.Named, compiled: bool) -> torch.optim.Optimizer:
        if row.label:
            raise RuntimeError(row.label)
        return Compiled([param for _, param in named], lr=0.0)

    members = [Row("x", "A", label, make=make, compiles=True) for label in ("", "broken")]
    measure(members, options=("--no-peers",))
    assert events[-2:] == ["step", "reset"]
    assert events.count("reset") == 1


def test_gradients_and_views_are_restored() -> None:
    problem = Problem("tiny", "cpu", 0)
    grads = [param.grad.clone() for param in problem.params if param.grad is not None]
    first, second = problem.params[:2]
    assert first.grad is not None
    first.grad.zero_()
    second.grad = None
    second.data = second.data.view(-1)
    problem.restore()
    for param, shape, grad in zip(problem.params, problem.shapes, grads, strict=True):
        assert param.shape == shape.size
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
    problem.check()
    with torch.no_grad():
        first[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="finite"):
        problem.check()
    assert all(param.isfinite().all() for param in problem.params)


def test_state_is_counted_once_however_deep() -> None:
    problem = Problem("tiny", "cpu", 0)
    param = problem.params[0]
    opt = torch.optim.SGD([param])
    tensor = torch.zeros(10)
    holder = type("Holder", (), {})()
    holder.deep = (torch.zeros(3),)
    state = {"list": [tensor, tensor[:5]], "object": holder, "param": param, "grad": param.grad}
    opt.state[param] = state
    assert stopwatch.state_bytes(opt, problem.params) == 4 * (10 + 3)


def test_figure_and_tables(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    result = measure([DEFAULTS, BROKEN], [MATRICES])
    del result["by_name"]
    files = [tmp_path / "step_cpu.json", tmp_path / "step_cuda.json"]
    files[0].write_text(json.dumps(result))
    result["config"]["device"] = "cuda"
    result["hardware"]["gpu"] = "some GPU"
    files[1].write_text(json.dumps(result))
    step_figure.main([str(path) for path in files])
    text = (tmp_path / "step.md").read_text(encoding="utf-8")
    for device in ("cpu", "cuda"):
        assert f"(results/step_{device}.svg)" in text
        content = (tmp_path / f"step_{device}.svg").read_bytes()
        assert len(content) < 200_000
        assert DEFAULTS.name.encode() in content
    row = next(row for row in result["rows"] if row["name"] == DEFAULTS.name)
    ratio = row["ratios"][step.REFERENCES[0]]
    assert text.count(f"| **{DEFAULTS.name}** | {row['ms']:.3g} ({ratio:.2f}) | 8.0 |") == 2
    assert f"- {BROKEN.name}: ValueError: sigma" in text
    assert f"| **{BROKEN.name}**" not in text
    assert "Threads: tiny 1" in text
    result["hardware"]["gpu"] = "another GPU"
    (tmp_path / "other.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        step_figure.main([*map(str, files), str(tmp_path / "other.json")])
    assert "files for cuda must be of one machine, got some GPU, another GPU" in (
        capsys.readouterr().err
    )
    del result["copy_gb_per_s"]  # as those of diagnostics
    (tmp_path / "other.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        step_figure.main([str(tmp_path / "other.json")])
    assert "other.json, which has no copy_gb_per_s" in capsys.readouterr().err


def test_matrices_are_compared_with_the_fastest_of_the_others() -> None:
    """Not with ours, nor with one that has all parameters, nor with one that failed."""

    def row(name: str, ms: float, kind: str = "matrix", error: str | None = None) -> dict[str, Any]:
        numbers = {"state_bytes_per_parameter": 4.0, "temporary_share": 0.0}
        return {"name": name, "ms": ms, "kinds": [kind], "error": error, "note": "", **numbers}

    def result(model: str, *rows: dict[str, Any]) -> dict[str, Any]:
        config, hardware = {"model": model}, {"gpu": "some GPU"}
        about = {"config": config, "hardware": hardware, "versions": {}, "copy_gb_per_s": 1.0}
        return {**about, "rows": [{**row, "ratios": {}} for row in rows]}

    ours, muon = row("torchpisa MISA", 3.0), row("torch Muon", 24.0)
    failed, everything = row("a Muon", 1.0, error="no"), row("torch AdamW", 1.0, kind="vector")
    large = result("gpt2-124m", everything, muon, ours, failed, row("other Muon", 6.0))
    text = step_figure.markdown([large, result("gpt2-355m", muon, ours), result("small")], "x.svg")
    assert "which is other Muon for gpt2-124m; torch Muon for gpt2-355m.\n" in text
    assert "| **torchpisa MISA** | 3 (0.50) | 3 (0.12) | – |" in text
    assert "| torch Muon | 24 (4.00) | 24 (1.00) | – |" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device must be cuda or cpu, got tpu"),
        (["--repeats", "0"], "--repeats must be >= 1, got 0"),
        (["--only", "nobody"], "--only must be in the name of a row, got nobody"),
        (["--save", "nowhere/a.json"], "--save must be in a folder that exists"),
        (["--model", "gpt5"], "gpt5"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step.main(["--device", "cpu", *options])
    assert message in capsys.readouterr().err


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "nothing"])
    names = (
        "step,figure,walk,diagnostics,federated,engines,defaults,lightbench,distributed,"
        "distributed-figure,owners"
    )
    with pytest.raises(SystemExit, match=rf"\{{{names}\}}"):
        command.main()
    monkeypatch.setattr("sys.argv", ["benchmarks", "step", "--help"])
    with pytest.raises(SystemExit):
        command.main()
    assert "gpt2-1.5b" in capsys.readouterr().out


# Federated rounds


def test_federated_rounds_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(40) % 10
    images = Split(torch.randn(40, 1, 28, 28), labels)
    small = Dataset("mnist", 10, images, None, images)
    monkeypatch.setattr("recipes.datasets.load", lambda *arguments, **options: small)
    path = tmp_path / "rounds.json"
    federated.main(["--device", "cpu", "--rounds", "2", "--out", str(path)])
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["rounds"] == 2
    assert 0 <= result["sisa_accuracy"] <= 100
    times = [value for name, value in result.items() if "seconds" in name]
    assert len(times) == 4
    assert min(times) > 0


def test_all_rows_in_turn(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    other = Row("torchpisa", "NSISA", "again", kinds=rows.KERNELS)
    for options, sets in ((("--no-peers",), 2), (("--no-peers", "--together"), 1)):
        result = measure([MATRICES], [other], options=options)
        assert {MATRICES.name, other.name} < result["by_name"].keys()
        assert capsys.readouterr().out.count(f" of {sets}: in turn") == sets
