"""The notebooks, executed whole; the widget, and its Stop button, through a real kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")

FOLDER = Path(__file__).parents[1] / "notebooks"
#: It stands for the others; the tests of the widget tune in a kernel, too.
IN_BRIEF = ("03_replay",)
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
pytestmark = [pytest.mark.notebook, pytest.mark.cluster, pytest.mark.slow]


def test_there_are_four() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in IN_BRIEF else pytest.mark.wide, id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_notebooks_run_whole(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    where = {"metadata": {"path": FOLDER}}
    client = nbclient.NotebookClient(notebook, timeout=600, startup_timeout=240, resources=where)
    client.execute()
    fresh = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    silent = [index for index, count in enumerate(stored) if count and not fresh[index]]
    assert not silent, "cells that say nothing now"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """A kernel and its client."""
    manager, client = jupyter_client.manager.start_new_kernel(
        startup_timeout=240, kernel_name="python3"
    )
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


TUNE = f"""
import sys
import hvd_autosync
study = hvd_autosync.tune(
    [sys.executable, {str(FOLDER.parent / "examples" / "synthetic_benchmark.py")!r},
     *"--model vgg --width 4 --depth 2 --size 8 --batch-size 2 --steps 100000".split()],
    np=2, options=["--gloo"], trials=12, steps=8, warmup=2, store={{store!r}},
)
print("STATUS", study.record.status.value, len(study.history))
"""


class Page:
    """What a page of a browser would know of a running cell."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.models: dict[str, dict[str, Any]] = {}
        self.text = ""
        self.error = ""

    def listen(self, until: Any, seconds: float = 300.0) -> None:
        """Take in messages until ``until()`` is true."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"{self.text}\n{self.error}"
            message = self._client.get_iopub_msg(timeout=end - time.monotonic())
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.models[content["comm_id"]] = dict(content["data"].get("state", {}))
            elif kind == "comm_msg" and content["data"].get("method") == "update":
                self.models.setdefault(content["comm_id"], {}).update(content["data"]["state"])
            elif kind == "stream":
                self.text += content["text"]
            elif kind == "error":
                self.error = content["ename"]

    def shown(self) -> str:
        """All text of the widgets."""
        return " ".join(str(model.get("value", "")) for model in self.models.values())

    def click(self, description: str) -> None:
        """Press the button of that name, as JupyterLab says it: to a subshell."""
        session = self._client.session
        asked = session.msg("create_subshell_request", {})
        self._client.control_channel.send(asked)
        reply = self._client.get_control_msg(timeout=120)
        (button,) = (i for i, m in self.models.items() if m.get("description") == description)
        content = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
        message = session.msg("comm_msg", content)
        message["header"]["subshell_id"] = reply["content"]["subshell_id"]
        self._client.shell_channel.send(message)


@pytest.mark.wide  # `test_jupyterlab.py` does so in a browser
def test_the_widget_moves_and_stop_stops(kernel: Any, tmp_path: Path) -> None:
    _, client = kernel
    cell, page = TUNE.format(store=str(tmp_path / "t.db")), Page(client)
    client.execute(cell)
    page.listen(lambda: "exploring (default)" in page.shown())
    page.listen(lambda: "trial 1," in page.shown())
    assert "best so far" in page.shown() and "<table>" in page.shown()
    page.click("Stop")
    page.listen(lambda: "STATUS" in page.text)
    assert "STATUS running" in page.text, page.text
    assert "stopped; run the same call again to resume" in page.shown()
    before = int(page.text.split()[-1])
    client.execute(cell)  # goes on, in the same kernel
    again = Page(client)
    again.listen(lambda: "resumes after" in again.shown())
    again.listen(lambda: "STATUS finished" in again.text)
    assert int(again.text.split()[-1]) > before


@pytest.mark.wide
def test_stop_of_a_live_tuning_leaves_the_training(kernel: Any, tmp_path: Path) -> None:
    _, client = kernel
    cell = TUNE.format(store=str(tmp_path / "t.db")).replace("np=2", 'np=2, mode="live"')
    cell = cell.replace("trials=12", "trials=300")  # it does not end before it is stopped
    page = Page(client)
    client.execute(f"import os; os.environ['XDG_DATA_HOME'] = {str(tmp_path)!r}\n{cell}")
    page.listen(lambda: "exploring (default)" in page.shown())
    assert "the training starts; what it prints goes to" in page.shown()
    page.click("Stop")
    page.listen(lambda: "STATUS" in page.text)
    assert "STATUS running" in page.text, page.text
    assert "stopped; the training goes on; to resume" in page.shown()
    client.execute("print('TRAINS', study.training.status, study.training.stop())")
    page.listen(lambda: "TRAINS" in page.text)
    assert "TRAINS None 143" in page.text


def test_an_interrupt_of_the_kernel_stops_cleanly(kernel: Any, tmp_path: Path) -> None:
    manager, client = kernel
    page = Page(client)
    # Else the kernel would drop what is sent while it still writes the traceback.
    client.execute(TUNE.format(store=str(tmp_path / "t.db")), stop_on_error=False)
    page.listen(lambda: "trial 1," in page.shown())
    manager.interrupt_kernel()
    page.listen(lambda: bool(page.error))
    assert page.error == "KeyboardInterrupt"
    check = Page(client)
    client.execute("import psutil; print('LEFT', len(psutil.Process().children(recursive=True)))")
    check.listen(lambda: "LEFT" in check.text)
    assert check.text.split()[-1] == "0", "no process of a trial is left"
