"""The documentation's site has every page, its links lead somewhere, and its reference is that of the code."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import CHROMIUM, Chromium

ROOT = Path(__file__).parents[2]
CUT = """[document.documentElement, ...document.querySelectorAll("article *, nav *")].filter(part =>
    part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0
    && (part === document.documentElement || getComputedStyle(part).overflowX !== "visible"))
  .map(part => part.textContent.trim().slice(0, 60))"""
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/podium-rl/podium/"


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files, and writes nothing to stderr."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for target in [entry] if isinstance(entry, str) else entry.values():
            yield from [target] if isinstance(target, str) else _entries(target)


def test_the_menu_has_every_page_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(_entries(nav)) == sorted(pages)


def test_links_into_the_repository_lead_to_files() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for link in re.findall(rf"{re.escape(REPOSITORY)}(?:blob|tree)/main/([^)#\s\"]*)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name}: {link}"


def test_no_wrapped_sentence_begins_a_list() -> None:
    """A line of a paragraph that begins with "- 1. With" or "+ 1 again" is shown as an item of a list."""
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not re.findall(r"\S\n[ ]*(?:[+] |[-*] \d|\d+[.)] ).*", text), page.name


def test_pictures_are_there() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for image in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", page.read_text()):
            local = image.removeprefix(f"{REPOSITORY}raw/main/")
            path = page.parent / image if local == image else ROOT / local
            assert (image.startswith("https://") and local == image) or path.exists(), f"{page.name}: {image}"


def test_the_reference_is_that_of_the_code() -> None:
    for path, text in runpy.run_path(str(DOCS / "reference" / "write.py"))["pages"]().items():
        assert path.read_text() == text, f"{path.name} is old: python docs/reference/write.py"


def test_the_pictures_are_those_of_their_script() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    for draw in drawn["PICTURES"]:
        path = DOCS / "pictures" / f"{draw.__name__}.svg"
        assert path.read_text() == draw().svg(), f"{path.name} is old: python docs/pictures/draw.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Dead links and anchors are warnings, which end the build."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")  # zensical writes beside the file that a link leads to
    for source in ("src", "plugins/podium-testing/src"):
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe:" not in done.stdout + done.stderr  # a docstring that does not fit its function
    return folder / "site"


@pytest.mark.exhaustive
def test_the_site_has_a_first_page_of_the_reference_with_all_public_names(site: Path) -> None:
    assert (site / "index.html").exists()
    text = (site / "reference" / "index.html").read_text()
    for name in ("podium.PPOTrainer", "podium.trainer.GRPOConfig", "podium.Batch", "podium.rewards.Grader"):
        assert re.search(rf"#{re.escape(name)}[\"'>]", text), name


@pytest.mark.exhaustive
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Neither scripts, styles and fonts, nor what scripts would ask for, as of a repository in the header."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        links = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'>\s]+)", text)
        tags = [tag for tag in re.findall(r"<link\b[^>]*>", text) if not re.search("canonical|next|prev", tag)]
        links += re.findall(r"\bhref=[\"']?([^\"'>\s]+)", " ".join(tags))
        assert not [link for link in links if link.startswith(("http:", "https:", "//"))], path
        assert not re.search(r"data-md-component=[\"']?source\b|class=[\"']?mermaid", text), path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text()), path


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.exhaustive
def test_nothing_is_cut_at_1280_points(site: Path) -> None:
    """On the pages with the longest lines, the widest tables, the longest names and the list of names."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, Chromium(width=1280) as browser:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        for page in ("", "configuration", "coming-from-verl", "models", "reference", "reference/workers"):
            browser.call("Page.navigate", url=f"{home}{page}")
            browser.wait(f"document.readyState === 'complete' && location.pathname.startsWith('/{page}')")
            assert browser.run(CUT) == [], page
        server.shutdown()
    assert [url for url in browser.requests if not url.startswith((home, "data:", "about:"))] == []
