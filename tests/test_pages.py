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
    """The tables of README and migrating.md have cells of docs/results/language_nano.md."""
    pages = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/migrating.md")
    ]
    for name, shown in (("AdamW", "AdamW"), ("Muon", "Muon + AdamW"), ("MISA", "MISA")):
        *_, loss, _, time, _, state, _ = cells("language_nano", f"Nano | {name}")
        row = f"| {shown} | {loss.strip('*')} | {state} | {time} ms |"
        assert all(row in page for page in pages), name


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
        text = words(f"docs/{page}.md")
        assert f"{time} ms of" in text
        assert f"{float(muon_time):.0f} of {muon_step}" in text or (
            f"{float(muon_time):.0f} ms of {muon_step}" in text
        )
        assert step in text


def words(page: str) -> str:
    """The text of a page, with a space for every break."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_stages_of_misa() -> None:
    """What docs/misa.md says of the comparison of stages, by seeds that both sides have."""
    losses: dict[str, dict[int, float]] = {}
    times: dict[str, float] = {}
    for run in saved("language_stages")["runs"].values():
        label, seed = run["settings"]["label"], run["settings"]["seed"]
        losses.setdefault(label, {})[seed] = run["last"]
        if seed == 0:
            times[label] = run["optimizer_ms"]

    def mean(label: str, seeds: Any = None) -> float:
        own = losses[label]
        return sum(own[seed] for seed in seeds or own) / len(seeds or own)

    def ahead(label: str, other: str, numbers: dict[int, str]) -> str:
        both = losses[label].keys() & losses[other].keys()
        return f"{mean(other, both) - mean(label, both):.3f} ({numbers[len(both)]})"

    page, numbers = words("docs/misa.md"), {1: "one seed", 2: "two seeds", 3: "three seeds"}
    whiten, eigenbases = (
        ahead(f"misa_{stage}_decay", "misa_decay", numbers) for stage in ("whiten", "both_sides")
    )
    assert f"whitening ends {whiten.replace(' (', ' below MISA without a stage (')}" in page
    assert f"the eigenbases of both sides {eigenbases}" in page
    factors = [
        times[f"misa_{stage}_decay"] / times["misa_decay"] for stage in ("whiten", "both_sides")
    ]
    assert [round(factor) for factor in factors] == [7, 38]
    assert "for seven and 38 times the optimizer's time" in page
    muon, rest, normuon = (
        f"{mean(f'{other}_decay') - mean('misa_decay'):.3f}"
        for other in ("muon", "muon_rest_misa", "normuon")
    )
    assert (
        f"MISA without a stage ends {muon} below Muon with AdamW, {rest} below Muon with MISA's "
        f"rule for the embedding, and {normuon} below NorMuon"
    ) in page
    assert f"MISA ends {muon} below Muon" in page
    ours, theirs = (numbers[len(losses[label])] for label in ("misa_decay", "muon_decay"))
    seeds = f"{ours.split()[0]} and {theirs}"
    assert f"MISA ends {muon} below Muon ({seeds}, " in words("README.md")
    same_stage = mean("soap_muon_decay") - mean("misa_both_sides_decay")
    assert f"it ends {same_stage:.3f} below SOAP-Muon" in page
    decay = ahead("misa_decay", "misa", numbers)
    assert f"ends {decay.replace(' (', ' lower than no decay (')}" in page


def test_time_of_orthogonalisation() -> None:
    """Pages that name the fastest other library name the one in the tables."""

    def milliseconds(file: str, name: str) -> str:
        rows = {row["name"]: row for row in saved(file)["rows"]}
        return f"{rows[name]['ms']:.1f}"

    misa = milliseconds("matrices_cuda_gpt2-124m", "torchpisa MISA, defaults")
    nsisa = milliseconds("step_cuda_gpt2-124m", "torchpisa NSISA, defaults")
    fastest = milliseconds("step_cuda_gpt2-124m", "pytorch_optimizer Muon")
    where = "which is pytorch_optimizer Muon for gpt2-124m;"
    assert where in (ROOT / "docs" / "results" / "step.md").read_text(encoding="utf-8")
    speed = words("docs/speed.md")
    assert f"NSISA {nsisa} ms and MISA {misa} ms" in speed
    assert f"pytorch_optimizer's, takes {fastest} ms" in speed
    assert f"pytorch_optimizer's: {fastest} ms for the matrices alone, MISA {misa}," in words(
        "docs/misa.md"
    )
    assert f"takes {fastest} ms for the matrices alone, and MISA {misa};" in words("README.md")


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
    assert engines.table(result) in (ROOT / "docs" / "federated.md").read_text(encoding="utf-8")
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
    page = (ROOT / "docs" / "federated.md").read_text(encoding="utf-8")
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
    """README.md has rows of the table of saved runs."""
    table = (ROOT / "docs" / "results" / "budgets.md").read_text(encoding="utf-8").splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for begin in ("| data |", "| MNIST, 1 l", "| Fashion-MNIST, 1 l", "| CIFAR-10, 1 l"):
        assert next(line for line in table if line.startswith(begin)) in readme, begin
