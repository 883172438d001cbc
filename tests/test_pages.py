"""The tables of the pages are those of the saved results."""

import json
from pathlib import Path
from typing import Any

from benchmarks import engines, first_round, uneven_parts
from benchmarks.defaults import report as defaults
from recipes.budgets.config import TRIALS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

NAMES_OF_LANGUAGE = [("MISA", "MISA"), ("Muon + AdamW", "Muon"), ("NSISA", "NSISA")]
NAMES_OF_LANGUAGE += [("AdamW", "AdamW")]


def runs(*names: str) -> list[dict[str, Any]]:
    return [run for name in names for run in saved(name)["runs"]]


def saved(name: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_uneven_parts() -> None:
    plain = uneven_parts.table(runs("uneven_parts")).replace("**", "")
    assert plain in PAGE.replace("**", "")


def test_defaults() -> None:
    assert defaults.overview(runs("defaults")) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_gpt2() -> None:
    """The README's table has cells of docs/results/language_nano.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, shown in (("AdamW", "AdamW"), ("Muon", "Muon + AdamW"), ("MISA", "MISA")):
        *_, loss, _, time, _, state, _ = cells("language_nano", f"Nano | {name}")
        assert f"| {shown} | {loss.strip('*')} | {state} | {time} ms |" in readme


def cells(page: str, first: str) -> list[str]:
    """The cells of the first row of a saved table that begins so."""
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip(" *") for cell in line.split("|")[1:-1]]


def test_overview() -> None:
    """The first table of docs/results.md says what the tables below it say."""
    ends = [
        f"{name} {cells('language_nano', f'Nano | {key}')[4].split()[0]}"
        for name, key in NAMES_OF_LANGUAGE
    ]
    assert f"| {', '.join(ends)} |" in PAGE
    misa, adamw = (cells("lightbench", name)[1].split(" (")[0] for name in ("misa", "adamw-0.001"))
    assert f"| MISA solves {misa} tasks, AdamW {adamw.split()[0]} |" in PAGE
    text = (ROOT / "docs" / "results" / "defaults.md").read_text(encoding="utf-8")
    better = [
        int(line.split("|")[4].split()[0])
        for line in text.splitlines()
        if line.startswith(("| MISA | choose |", "| MISA | judge |"))
    ]
    constant, cosine = sum(better[:2]), sum(better[2:4])
    assert f"better than AdamW at 1e-3 on {constant} and {cosine} of 18 tasks |" in PAGE


def test_finetuning() -> None:
    """The first table of docs/finetune.md is that of the results."""
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    by_label = {
        run["settings"]["choice"]["label"]: dict(zip(run["epoch"], run["test_loss"], strict=True))
        for run in saved("language_finetune")["runs"].values()
    }
    titles = {
        "adamw_published": "AdamW, published setting",
        "sisa_row": "SISA, the paper's row",
        "misa_lr0.004": "MISA, lr 4e-3",
        "adamw_lr0.001": "AdamW, lr 1e-3",
        "sisa_row_scheme2": "SISA, the paper's row with Scheme II",
        "sisa_lr0.001": "SISA, lr 1e-3",
    }
    for label, title in titles.items():
        shown = [f"{by_label[label][epoch]:.2f}" for epoch in (2, 5, 15)]
        assert f"| {title} | {' | '.join(shown)} |" in page, shown
    pretrained = next(iter(saved("language_finetune_pretraining")["runs"].values()))
    assert f"validation loss {pretrained['val_loss'][-1]:.2f})" in page


def test_time_of_misas_kernels() -> None:
    """The pages on MISA and speed quote the comparison of stages."""
    ours, muon = (cells("language_stages", name) for name in ("MISA", "Muon"))
    (time, step), (muon_time, muon_step) = (row[5:7] for row in (ours, muon))
    for page in ("misa", "speed"):
        text = " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
        assert f"{time} ms of" in text
        assert f"{float(muon_time):.0f} of {muon_step}" in text or (
            f"{float(muon_time):.0f} ms of {muon_step}" in text
        )
        assert step in text


def last_rounds(name: str, algorithm: str, cell: str) -> str:
    """The mean over seeds of the accuracy in the last round, as pages have it."""
    found = [
        run["last"]
        for key, run in saved(name)["runs"].items()
        if key.startswith(f"{cell}_{algorithm}_seed")
    ]
    assert len(found) == 3
    return f"{sum(found) / 3:.1f} %"


def test_which_federated_algorithm() -> None:
    """The answers on docs/federated.md have the numbers of the saved runs."""
    text = " ".join((ROOT / "docs" / "federated.md").read_text(encoding="utf-8").split())
    digits = "heterogeneity_rivals_digits"
    adagrad, fedavg = (last_rounds(digits, a, "digits_1label") for a in ("fedadagrad", "fedavg"))
    assert f"FedAdagrad ends at {adagrad} and FedAvg at {fedavg}." in text

    def equal_costs(results: str, cell: str, *algorithms: str) -> list[str]:
        return [last_rounds(results, name, f"{cell}_1label") for name in algorithms]

    names = {"MNIST": "mnist", "CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}
    for shown, name in names.items():
        misa, fedavg = equal_costs("budgets", name, "misa", "fedavg")
        assert f"{shown} ({misa}, FedAvg {fedavg})" in text
    few = equal_costs("budgets_digits", "digits", "misa_local", "misa", "fedavg")
    assert "LocalMISA ends at {}, MISA at {}, FedAvg at {}.".format(*few) in text
    adult = dict(zip(TRIALS, cells("budgets", "Adult, 1 label")[2:], strict=False))
    means = {name: float(shown.strip("*").split()[0]) for name, shown in adult.items()}
    assert f"MISA's {means['misa']:.1f} %" in text
    assert max(abs(mean - means["misa"]) for mean in means.values()) <= 0.9


def test_engines() -> None:
    """The table beside other engines is that of the saved run, in which all did the same."""
    result = saved("federated_engines")
    page = (ROOT / "docs" / "federated-results.md").read_text(encoding="utf-8")
    assert engines.table(result) in page
    for rows in result["cases"].values():
        assert set(rows) == set(engines.ENGINES)
        assert max(row["distance"] for row in rows.values()) < 1e-3
        accuracies = [row["accuracy"] for row in rows.values()]
        assert max(accuracies) - min(accuracies) < 0.3
        # What the text below the table says.
        at_once, in_turn, pfl, strategy, flower = (rows[n]["cpu_seconds"] for n in engines.ENGINES)
        assert at_once < min(pfl, in_turn) < max(pfl, in_turn) < flower < strategy
        assert (in_turn > 1.05 * pfl) == (rows is result["cases"]["10 clients"])


def test_first_round() -> None:
    """The tables on SISA without sigma and rho are those of the saved runs."""
    result = saved("first_round")
    page = (ROOT / "docs" / "federated-results.md").read_text(encoding="utf-8")
    assert first_round.table(result) in page
    assert first_round.digits_table(result) in page


def test_animation() -> None:
    """The text below the animation on docs/federated.md has its numbers."""
    text = " ".join((ROOT / "docs" / "federated.md").read_text(encoding="utf-8").split())
    curves = {name: run["accuracy"] for name, run in saved("one_label")["runs"].items()}
    first = {
        name: next(k for k, value in enumerate(curve) if value >= 90)
        for name, curve in curves.items()
    }
    assert (
        f"after {first['MISA']} rounds, SISA after {first['SISA']}, Scaffold after "
        f"{first['Scaffold']}, FedAvg after {first['FedAvg']}."
    ) in text


def test_resnet() -> None:
    """The README's line on ResNet-34 has the means of docs/results/vision.json."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    last: dict[str, list[float]] = {}
    for run in saved("vision")["runs"].values():
        if run["settings"]["model"] == "resnet34":
            last.setdefault(run["settings"]["choice"]["label"], []).append(run["last"])
    means = {label: f"{sum(found) / len(found):.1f}" for label, found in last.items()}
    assert set(means) == {"misa", "sgd", "sisa"}
    assert (
        f"MISA with default settings {means['misa']} %, SGD with momentum {means['sgd']} %, "
        f"SISA {means['sisa']} %."
    ) in readme


def test_equal_costs() -> None:
    """The README's sentence on clients with one label has the means of saved runs."""
    names = ("misa", "server_muon", "sisa", "fedavg")
    misa, muon, sisa, fedavg = (last_rounds("budgets", name, "cifar10_1label") for name in names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert (
        f"MISA ends at {misa} on CIFAR-10, Muon on the server at {muon}, SISA at {sisa}, "
        f"FedAvg at {fedavg} ("
    ) in readme
