"""Every Python example of the README and of docs/ that is a whole script runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md"] + [
    ROOT / "docs" / f"{page}.md" for page in ("workers", "coming-from-verl", "coming-from-areal")
]


def _scripts() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        whole = [block for block in blocks if "podium.connect" in block and "..." not in block.split("with podium")[1]]
        found += [(f"{page.name}-{number}", block) for number, block in enumerate(whole)]
    return found


@pytest.mark.parametrize("script", [pytest.param(code, id=name) for name, code in _scripts()])
def test_a_script_of_the_docs_runs_as_printed(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_scripts_to_run_on_every_page() -> None:
    assert {name.rpartition("-")[0] for name, _ in _scripts()} == {page.name for page in PAGES}
    assert len(_scripts()) == 6
