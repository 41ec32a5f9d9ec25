"""The documentation as a site: it builds without a warning, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == {*pages, "404"}


class _Fetched(HTMLParser):
    """What a browser fetches for a page by itself: scripts, styles, images, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.found.append(given["src"])
        fetched = ("stylesheet", "preload", "preconnect", "icon", "prefetch")
        if tag == "link" and given.get("rel", "").split()[-1:] in [[word] for word in fetched]:
            self.found.append(given["href"])


def test_nothing_comes_from_the_network(site: Path) -> None:
    fetched = []
    for page in site.glob("*.html"):
        parser = _Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found, f"{page.name} has a style at least"
        fetched += [(page.name, each) for each in parser.found]
    away = [each for each in fetched if re.match(r"(https?:)?//", each[1])]
    assert not away
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", styles)


def test_the_api_has_what_is_public(site: Path) -> None:
    import hvd_autosync

    text = (site / "api.html").read_text(encoding="utf-8")
    wanted = [*hvd_autosync.__all__, "torch.DistributedOptimizer"]
    wanted.append("extensions.Extensions.add_codec")
    assert [name for name in wanted if f'id="hvd_autosync.{name}"' not in text] == []
    assert not re.search(r":(func|class|meth|mod):", text), "roles are Sphinx's, and none of ours"


def test_what_docstrings_name_is_linked(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    links = re.findall(r'<a class="autorefs[^"]*"[^>]*href="#(hvd_autosync\.[^"]+)"', text)
    assert len(links) > 20, "roles became links"
    assert [each for each in links if f'id="{each}"' not in text] == []
    assert "<autoref" not in text
