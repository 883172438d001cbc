"""Show what the models of a comparison wrote for some of the test recipes, as Markdown.

python -m recipes.language.finetune.texts runs/short/language_finetune.json --texts runs/texts
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.language.finetune.results import by_model, rows
from recipes.recipe import Results, read_results

__all__ = ["excerpts", "main"]

LONGEST = 400  # characters


def excerpts(results: Results, folder: Path, count: int) -> str:
    """Return the last texts of the table's rows for the first test recipes.

    Args:
        results: of a comparison.
        folder: where the runs left their texts.
        count: how many recipes.

    Raises:
        FileNotFoundError: there are no texts of any row.
    """
    parts = []
    for model, runs in by_model(results).items():
        files = {row.title: folder / f"{name_of(results, row.runs[0])}.json" for row in rows(runs)}
        written = {title: last_texts(file) for title, file in files.items() if file.is_file()}
        if not written:
            raise FileNotFoundError(f"none of {', '.join(map(str, files.values()))} is there")
        some = next(iter(written.values()))
        for number, recipe in enumerate(some[:count]):
            parts.append(f"**GPT-2 {model}**, ingredients: {recipe['ingredients']}")
            lines = [f"- The recipe: {one_line(recipe['reference'])}"]
            lines += [
                f"- {title}: {one_line(texts[number]['text'])}" for title, texts in written.items()
            ]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def name_of(results: Results, run: dict[str, Any]) -> str:
    return next(name for name, other in results["runs"].items() if other is run)


def last_texts(file: Path) -> list[dict[str, str]]:
    by_epoch = json.loads(file.read_text(encoding="utf-8"))
    texts: list[dict[str, str]] = by_epoch[max(by_epoch, key=int)]
    return texts


def one_line(text: str) -> str:
    """Return the beginning of a text, on one line, without what Markdown would take for its own."""
    return "".join(escaped(textwrap.shorten(text, LONGEST, placeholder=" ...")))


def escaped(text: str) -> Iterator[str]:
    for character in text:
        yield f"\\{character}" if character in r"\`*_[]<>|" else character


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes language finetune texts", description="Show what models wrote"
    )
    parser.add_argument("results", type=Path, help="JSON file of the recipe")
    parser.add_argument("--texts", type=Path, default=Path("runs/texts"), help="folder")
    parser.add_argument("--recipes", type=int, default=3, help="how many; default %(default)s")
    args = parser.parse_args(argv)
    if args.recipes < 1:
        parser.error(f"--recipes must be >= 1, got {args.recipes}")
    try:
        results = read_results("results", args.results, "language_finetune")
    except ValueError as error:
        parser.error(str(error))
    try:
        page = excerpts(results, args.texts, args.recipes)
    except FileNotFoundError as error:
        parser.error(f"--texts must be the folder with the texts of the runs: {error}")
    path = args.results.with_name(f"{args.results.stem}_texts.md")
    path.write_text(page, encoding="utf-8")
    print(path)
