"""The picture of a terminal shows what the terminal showed, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of the extra plot, as pyte is of the extra dev

from bench import pictures

FAINT, RED, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"


def test_the_lines_are_those_of_the_screen_and_of_what_scrolled_away() -> None:
    said = "first\r\n" + "".join(f"line {number}\r\n" for number in range(100))
    said += (
        f"a bar that goes\r\x1b[2K{FAINT}faint{PLAIN} {RED}red{PLAIN} \x1b[2;36mcyan{PLAIN} \x1b[38;2;1;2;3mrgb{PLAIN}"
    )
    lines = [line for line in pictures.screen_lines(said.encode()) if line.plain.strip()]
    assert lines[0].plain.rstrip() == "first"
    assert len(lines) == 102
    assert lines[-1].plain.rstrip() == "faint red cyan rgb"
    styles = {lines[-1].plain[at]: str(span.style) for span in lines[-1].spans for at in [span.start]}
    assert styles["f"] == "#8a8a8a"
    assert styles["r"].startswith(("red", "#010203"))
    assert styles["c"] == "cyan"


def test_a_picture_has_the_command_the_beginning_and_the_end(tmp_path: Path) -> None:
    said = "".join(f"line {number}\r\n" for number in range(200)).encode()
    pictures.draw_terminal(said, "make quickstart", tmp_path / "terminal.svg")
    text = (tmp_path / "terminal.svg").read_text()
    shown = re.sub(r"<[^>]*>", "", text.replace("&#160;", " "))
    assert "$ make quickstart" in shown
    assert "line 0" in shown
    assert "line 199" in shown
    assert "line 100" not in shown
    assert "⋮" in shown
    assert not re.search(r"url\(\"?http|href=\"http|@import", text)


def test_a_command_writes_into_a_terminal_of_its_own() -> None:
    script = "import os, sys; size = os.get_terminal_size(); print(sys.stdout.isatty(), size.columns, size.lines)"
    said = pictures.run_in_terminal([sys.executable, "-c", script])
    assert said.decode().split() == ["True", str(pictures.COLUMNS), str(pictures.LINES)]


def test_the_warm_up_before_and_the_paths_after_are_left_out() -> None:
    said = [
        "sft  1500 steps ──",
        "      1   2.8",
        "grpo  240 steps ──",
        "      1   0.2",
        "  100% ┌──┐",
        "",
        "  run      runs/x",
    ]
    lines = pictures.screen_lines("\r\n".join(said).encode())
    assert [line.plain.rstrip() for line in pictures.reinforcement(lines)] == said[2:5]
