"""The widget in a real JupyterLab, in a real browser: it appears, moves, and stops."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("jupyterlab")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.notebook,
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "synthetic_benchmark.py"
CELL = f"""
import sys
import hvd_autosync
study = hvd_autosync.tune(
    [sys.executable, {str(EXAMPLE)!r},
     *"--model vgg --width 4 --depth 2 --size 8 --batch-size 2 --steps 100000".split()],
    np=2, options=["--gloo"], trials=40, steps=100, warmup=2, store="traces.db",
)
print("STATUS", study.record.status.value, len(study.history))
"""
TOKEN = "of-this-test"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab whose folder has a notebook with one cell, ``tune.ipynb``."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "tune.ipynb")
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.extension_manager=readonly",
    ]
    with open(tmp_path / "lab.log", "w") as log:
        server = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")},
        )
    try:
        address = await_answer(tmp_path / "runtime" / f"jpserver-{server.pid}.json", server)
        yield f"{address}lab/tree/tune.ipynb?token={TOKEN}"
    finally:
        server.terminate()
        server.wait(120)


def await_answer(about: Path, server: subprocess.Popen[bytes]) -> str:
    """The address of a server, which it writes to the file ``about``, once it answers there."""
    deadline = time.monotonic() + 240
    while True:
        try:
            address = str(json.loads(about.read_text())["url"])
            urllib.request.urlopen(f"{address}api?token={TOKEN}", timeout=120).close()
            return address
        # There is none yet, it is being written, or it is too busy.
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)


def test_the_widget_appears_moves_and_stops(lab: str, tmp_path: Path) -> None:
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(lab)
        page.locator(".jp-Cell .cm-content").first.click()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()
        page.keyboard.press("Shift+Enter")
        widget = page.locator(".hvd-autosync").first
        widget.get_by_text("hvd-autosync study").wait_for()
        # Of some trial: a browser may be too slow to show each.
        widget.get_by_text(re.compile(r"trial [1-9]\d*, exploring")).wait_for()
        assert widget.locator("table tr").count() >= 2 and "best so far" in widget.inner_text()
        page.screenshot(path=tmp_path / "running.png")
        widget.get_by_role("button", name="Stop").click()
        widget.get_by_text("stopped; run the same call again to resume").wait_for()
        page.get_by_text("STATUS running").wait_for()
        assert widget.get_by_role("button", name="Stopped").is_disabled()
        page.screenshot(path=tmp_path / "stopped.png")
        browser.close()
