"""The benchmark of several processes: what it saves and counts, and the model of many nodes."""

import importlib.util
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks.distributed import command, overlap, owners, report, scaling
from benchmarks.distributed.measure import fit
from benchmarks.distributed.overlap import length, union, within, without
from benchmarks.distributed.processes import start
from benchmarks.distributed.scaling import Accelerator, Network
from benchmarks.distributed.training import REFERENCE, ROWS
from benchmarks.shapes import MODELS, parameters

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ATTACHED = "torchpisa SISA, attach"


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 loses events of gloo's threads")
@pytest.mark.usefixtures("forked")
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in one test, because workers that share tests would each start processes."""
    file = tmp_path / "distributed.json"
    options = ("--processes", 2, "--model", "tiny", "--repeats", 2, "--steps", 1, "--out", file)
    monkeypatch.setattr(command, "SIZES", [256, 4096, 65536])
    command.main([str(word) for word in options])
    result = json.loads(file.read_text())
    check_rows(result)
    check_bytes(result)
    check_overlap(result)
    check_tables_and_picture(file, result)


def check_rows(result: dict[str, Any]) -> None:
    assert result["config"]["model"] == "tiny"
    assert result["config"]["backend"] == "gloo"
    assert {"python", "torch", "torchpisa"} <= set(result["versions"])
    (run,) = result["runs"]
    assert run["processes"] == 2
    assert [row["name"] for row in run["rows"]] == [row.name for row in ROWS]
    for row in run["rows"]:
        assert len(row["samples_ms"]) == 2
        assert 0 < min(row["samples_ms"]) <= row["ms"] <= max(row["samples_ms"])
        assert row["ratio_of_medians"] > 0
    assert run["rows"][0]["name"] == REFERENCE
    assert run["rows"][0]["ratio_of_medians"] == run["rows"][0]["median_of_ratios"] == 1
    sums = run["all_reduce"]
    assert sums["bytes"] == [256, 4096, 65536]
    assert all(seconds > 0 for seconds in sums["seconds"])


def check_bytes(result: dict[str, Any]) -> None:
    """Check the bytes: those of the gradients, and for ours a line of numbers."""
    rows = {row["name"]: row for row in result["runs"][0]["rows"]}
    handed = {name: row["handed_bytes"] for name, row in rows.items()}
    count, tensors = rows[REFERENCE]["parameters"], rows[REFERENCE]["tensors"]
    line = 8 * (tensors + 5)  # S, who is present, who has a problem, and two counters of rounds
    assert handed[REFERENCE] == 4 * count
    assert handed[ATTACHED] == 4 * count + line
    assert handed["torchpisa SISA, process_group only"] == 4 * count + line
    assert handed["torchpisa SISA, attach, m=4"] == (4 * count + line) / 4
    assert handed["torchpisa SISA, attach, bfloat16"] == 2 * count + line
    assert handed["torchpisa NSISA, attach"] == 4 * count + line + 8  # it has two groups
    state = {name: row["state_bytes_per_parameter"] for name, row in rows.items()}
    assert state[REFERENCE] == pytest.approx(8, abs=0.2)
    assert state[ATTACHED] == pytest.approx(12, abs=0.2)


def check_overlap(result: dict[str, Any]) -> None:
    adamw, sisa = result["runs"][0]["overlap"]
    assert [adamw["name"], sisa["name"]] == [REFERENCE, ATTACHED]
    rows = {row["name"]: row for row in result["runs"][0]["rows"]}
    for times in (adamw, sisa):
        for lane in ("forward", "backward", "step"):
            assert times[lane]
            assert all(0 <= start <= end <= times["total"] for start, end in times[lane])
        for flight in times["all_reduces"]:
            assert flight["called"] <= flight["begun"] <= flight["done"] <= times["total"]
        sent = sum(flight["bytes"] for flight in times["all_reduces"])
        assert sent == rows[times["name"]]["handed_bytes"]
        under_way, waited = overlap.waited_ms(times)
        assert 0 <= waited <= under_way <= times["total"]
    assert not adamw["local"]
    assert sisa["local"]
    # Sums are started by the backward pass, but for the line of numbers.
    *early, line = sisa["all_reduces"]
    assert all(flight["called"] < sisa["backward"][-1][1] for flight in early)
    assert line["called"] > sisa["backward"][-1][1]


def check_tables_and_picture(file: Path, result: dict[str, Any]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    report.main([str(file)])
    picture = file.parent / "distributed_overlap.svg"
    content = picture.read_bytes()
    assert ATTACHED.encode() in content
    assert b"local steps" in content
    assert len(content) < 200_000
    report.main([str(file)])
    assert picture.read_bytes() == content
    text = (file.parent / "distributed.md").read_text(encoding="utf-8")
    row = result["runs"][0]["rows"][1]
    assert f"| **{ATTACHED}** | {row['ms']:.0f} |" in text
    assert f"| {row['handed_bytes']:,.0f} |" in text
    assert "(results/distributed_overlap.svg)" in text


def test_the_page_shows_the_committed_file() -> None:
    result = json.loads((RESULTS / "distributed.json").read_text(encoding="utf-8"))
    assert [run["processes"] for run in result["runs"]] == [2, 4]
    shown = {
        "distributed.md": report.measured(result, "results/distributed_overlap.svg"),
        "scaling.md": report.on_paper(),
    }
    page = (RESULTS.parent / "scaling.md").read_text(encoding="utf-8")
    for name, text in shown.items():
        assert (RESULTS / name).read_text(encoding="utf-8") == text
        assert f'--8<-- "docs/results/{name}"' in page
    assert (RESULTS / "distributed_overlap.svg").exists()


# The model of many nodes


def test_all_reduce_by_hand() -> None:
    network = Network(latency_s=1e-3, s_per_byte=1e-6)
    assert scaling.all_reduce_s(4, 1000, network) == pytest.approx(6e-3 + 1.5e-3)
    tree = network._replace(tree=True)
    assert scaling.all_reduce_s(4, 1000, tree) == pytest.approx(4e-3 + 1.5e-3)


def test_what_the_backward_pass_hides_by_hand() -> None:
    # A bucket of 100 bytes is ready after 1 s and takes 2 + 1 s; the next, of 300, is ready after
    # 4 s, when the first has just arrived, and takes 2 + 3 s.
    network = Network(latency_s=1.0, s_per_byte=0.01)
    assert scaling.exposed_s([100, 300], 4.0, 2, network) == pytest.approx(5.0)
    # Slower: the second waits for the first.
    assert scaling.exposed_s([100, 300], 2.0, 2, network) == pytest.approx(0.5 + 3 + 5 - 2)


def test_step_by_hand() -> None:
    count, tensors = parameters(MODELS["tiny"]()), len(MODELS["tiny"]())
    assert scaling.buckets("tiny") == [count]  # smaller than a bucket
    network = Network(latency_s=1.0, s_per_byte=1.0)
    slow = Accelerator(flop_per_s=2 * count, tokens=10)  # 10 s forward, 20 s backward
    given = {"accelerator": slow}
    sums, line = 2 + 4 * count, 2 + 8 * (tensors + 3)
    step = scaling.step_s
    assert step("tiny", 2, network, **given) == pytest.approx(30 + sums + line)
    assert step("tiny", 2, network, line=False, **given) == pytest.approx(30 + sums)
    assert step("tiny", 2, network, batches=4, **given) == pytest.approx(30 + (sums + line) / 4)
    half = step("tiny", 2, network, item_bytes=2, line=False, **given)
    assert half == pytest.approx(30 + 2 + 2 * count)


def test_buckets_are_those_of_ddp() -> None:
    for model in report.ON_PAPER:
        buckets = scaling.buckets(model)
        assert sum(buckets) == parameters(MODELS[model]())
        assert 4 * buckets[0] >= scaling.FIRST_BUCKET
        assert all(4 * count >= scaling.BUCKET for count in buckets[1:-1])


# Parts


def test_spans() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert union(spans) == [(0, 3), (5, 6)]
    assert length(spans) == 4
    assert without(spans, [(1, 2), (5.5, 9)]) == [(0, 1), (2, 3), (5, 5.5)]
    assert within(spans, [(2.5, 5.5)]) == [(2.5, 3), (5, 5.5)]


def test_line_is_found() -> None:
    sizes = [256, 4096, 65536]
    latency, per_byte = fit(sizes, [1e-4 + 2e-9 * size for size in sizes])
    assert latency == pytest.approx(1e-4)
    assert per_byte == pytest.approx(2e-9)


def _fail_on_one_rank() -> None:
    if distributed.get_rank() == 1:
        raise RuntimeError("no more")
    distributed.all_reduce(torch.zeros(1))


def test_a_failing_rank_ends_all() -> None:
    with pytest.raises(Exception, match=r"no more|closed by peer"):
        start(_fail_on_one_rank, 2)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1"], "--processes must be >= 2, got [1]"),
        (["--repeats", "0"], "--repeats must be >= 1, got 0"),
        (["--out", "nowhere/a.json"], "--out must be in a folder that exists"),
        (["--model", "gpt5"], "gpt5"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(options)
    assert message in capsys.readouterr().err


class Recorded:
    """An event of a profile, as far as it is asked for its name."""

    def __init__(self, name: str) -> None:
        self.name = lambda: name


def test_a_step_whose_last_all_reduce_was_not_recorded_does_not_count() -> None:
    names = ["c10d::allreduce_", "gloo:all_reduce", "c10d::allreduce_"]
    assert not overlap.is_complete([Recorded(name) for name in names])
    assert overlap.is_complete([Recorded(name) for name in names[:2]])


@pytest.mark.usefixtures("forked")
def test_a_tiny_run_of_owners(tmp_path: Path) -> None:
    file = tmp_path / "owners.json"
    options = ("--processes", 4, "--width", 8, "--layers", 1, "--repeats", 1, "--steps", 1)
    owners.main([str(word) for word in (*options, "--out", file)])
    (run,) = json.loads(file.read_text())["runs"]
    assert [row["name"] for row in run["rows"]] == [row.name for row in owners.ROWS]
    assert run["matrices"] == 4
    for row in run["rows"]:
        assert row["cpu_ms"] > 0
        assert row["largest_difference"] < 1e-5
    text = file.with_suffix(".md").read_text()
    assert all(f"| {row.name} |" in text for row in owners.ROWS)


def test_the_committed_table_is_that_of_the_result() -> None:
    result = json.loads((RESULTS / "owners.json").read_text())
    assert (RESULTS / "owners.md").read_text() == owners.table(result)
    assert [run["processes"] for run in result["runs"]] == [2, 4]


def test_owners_refuses_odd_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        owners.main(["--processes", "3"])
    assert "--processes must be even numbers >= 2, got 3" in capsys.readouterr().err
