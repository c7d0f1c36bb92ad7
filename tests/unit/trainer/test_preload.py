"""Imports that are made in a thread while a run waits for its workers."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from podium.trainer.preload import importing

UNTIL_ITS_END_IS_AWAITED = """
import sys, time

def functions(frame):
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back

begun = True
while "join" not in functions(sys._current_frames()[{waits}]):
    time.sleep(0.01)
"""


def test_modules_are_imported_beside_the_block_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ahead_broken.py").write_text("raise RuntimeError('whoever needs it says so')")
    (tmp_path / "ahead_first.py").write_text(UNTIL_ITS_END_IS_AWAITED.format(waits=threading.get_ident()))
    (tmp_path / "ahead_second.py").write_text("")
    with importing(["no_such_module", "ahead_broken", "ahead_first", "ahead_second"]):
        while not hasattr(sys.modules.get("ahead_first"), "begun"):
            assert any(thread.name == "podium-imports" for thread in threading.enumerate())
    assert not any(thread.name == "podium-imports" for thread in threading.enumerate())
    assert "ahead_second" not in sys.modules
