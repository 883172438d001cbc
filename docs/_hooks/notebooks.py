"""MkDocs hook: notebooks are executed while the site is built, and become pages.

`docs/notebooks/NAME.ipynb` is kept without outputs. Here Jupyter runs all of its cells, and a cell
that raises ends the build. The page `notebooks/NAME.md` is made of what came out, so it always
shows what this version of the package does. Its badges lead to the notebook itself.
"""

import base64
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from traitlets.config import Config

SECONDS = 300  # for one cell
COLAB = "https://colab.research.google.com/github"


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add a page for every notebook."""
    sources = [file for file in files if file.src_uri.endswith(".ipynb")]
    with ThreadPoolExecutor() as pool:  # each waits for a kernel of its own
        texts = list(pool.map(lambda file: page(Path(file.abs_src_path), config.repo_url), sources))
    for file, text in zip(sources, texts, strict=True):
        uri = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, uri, content=text))
    return files


def page(path: Path, repository: str | None) -> str:
    """Execute a notebook and return it, with its outputs, as Markdown.

    Args:
        path: of the notebook.
        repository: address of the repository, if it has one.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Through files of its own: over TCP, others on the machine could listen.
        sockets = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=SECONDS, resources=resources, config=sockets).execute()
    title, *parts = map(markdown, notebook.cells)
    heading, _, rest = title.partition("\n")
    return "\n\n".join([heading, badges(path.name, repository), rest.strip(), *parts])


def badges(name: str, repository: str | None) -> str:
    """Return what the notebook was executed with, and links to it."""
    package, torch = (version(each).partition("+")[0] for each in ("torchpisa", "torch"))
    found = [
        f'<span class="badge">executed with torchpisa {package} and torch {torch}</span>',
        f"[download the notebook]({name}){{ .badge download }}",
    ]
    match = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)/?", repository or "")
    if match is not None:
        branch = os.environ.get("GITHUB_REF_NAME", "main")
        address = f"{COLAB}/{match[1]}/blob/{branch}/docs/notebooks/{name}"
        found.append(f"[open in Colab]({address}){{ .badge }}")
    return "\n".join(found)


def markdown(cell: Any) -> str:
    """Return a cell and its outputs."""
    if cell.cell_type != "code":
        return str(cell.source)
    return "\n\n".join([fence("python", cell.source), *map(shown, cell.outputs)])


def shown(output: Any) -> str:
    """Return an output of a cell."""
    if output.output_type == "stream":
        return fence("text", output.text)
    data = output.data
    if "image/png" in data:
        image = "".join(data["image/png"].split())
        base64.b64decode(image, validate=True)
        return f"![What the cell above has drawn](data:image/png;base64,{image})"
    return fence("text", data["text/plain"])


def fence(language: str, text: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"
