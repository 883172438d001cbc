"""The curves that a reader can choose from, in a real browser."""

import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# What a reader does: hide the first curve, then point at the middle of the picture.
VISIT = """
const wait = setInterval(() => {
  const svg = document.querySelector(".curves svg");
  if (document.querySelectorAll(".curves svg").length < 3) return;
  clearInterval(wait);
  const before = document.querySelectorAll("polyline").length;
  document.querySelector(".curves button").click();
  const frame = svg.getBoundingClientRect();
  const at = { clientX: frame.left + frame.width / 2, clientY: frame.top + 5 };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  document.body.dataset.before = before;
}, 50);
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    page = (DOCS / "curves.md").read_text(encoding="utf-8")
    boxes = "".join(re.findall(r"<div class=\"curves\".*?</div>", page)).replace("../", "")
    script = (DOCS / "js" / "curves.js").read_text(encoding="utf-8")
    html = f"<!doctype html><meta charset=utf-8><body>{boxes}<script>{script}</script>"
    (tmp_path / "index.html").write_text(f"{html}<script>{VISIT}</script>", encoding="utf-8")
    (tmp_path / "results").mkdir()
    shutil.copy(DOCS / "results" / "demo.json", tmp_path / "results")
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_curves_can_be_chosen_and_read(site: str, tmp_path: Path) -> None:
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *OPTIONS, profile, "--virtual-time-budget=10000", "--dump-dom", site]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    dom = done.stdout
    assert 'data-before="' in dom, done.stderr[-2000:]
    names = re.findall(r'<polyline [^>]*data-name="([^"]*)"', dom)
    (before,) = re.findall(r'data-before="(\d+)"', dom)
    assert len(names) == int(before) - 1 == 6 + 2 * 5 - 1
    first = re.findall(r'<button [^>]*aria-pressed="false"[^>]*>([^<]*)<', dom)
    assert first == ["AdamW, default"]
    assert "AdamW, default" not in names
    assert re.search(r"MISA, default: 2\.\d+ at 1[45]0", dom)
