"""The documentation's site has every page, its links lead somewhere, and its reference is that of the code."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/podium-rl/podium/"


def _entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else _entries(target)


def test_the_menu_has_every_page_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(_entries(nav)) == sorted(pages)


def test_links_into_the_repository_lead_to_files() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for link in re.findall(rf"{re.escape(REPOSITORY)}(?:blob|tree)/main/([^)#\s\"]*)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name}: {link}"


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


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Dead links and anchors are warnings."""
    pytest.importorskip("zensical")
    shutil.copytree(DOCS, tmp_path / "docs")  # zensical writes beside the file that a link leads to
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe:" not in done.stdout + done.stderr  # a docstring that does not fit its function
    assert (tmp_path / "site" / "index.html").exists()
