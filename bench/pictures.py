"""Draw the pictures of the README: the quickstart as a terminal shows it, and its learning curve.

    python -m bench.pictures                    runs the quickstart: two minutes on two cores
    python -m bench.pictures --smoke            the short one
    python -m bench.pictures --run FOLDER       draws what lies in FOLDER: transcript.bin and grpo/metrics.jsonl

The command runs in a pseudo-terminal, whose screen becomes docs/pictures/terminal.svg: the first lines of GRPO, and
the report at the end. The pictures load no font and nothing else from elsewhere.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import groupby
from pathlib import Path

import matplotlib
import pyte
from pyte.screens import Char
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from podium.runs.run_reader import RunRecord
from podium_curves.drawing import build_curve, plot_curve

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS, LINES = 100, 50
FIRST, LAST = 9, 36  # lines that are shown of the beginning and of the end
_COLORS = {"default": None, "brown": "yellow", "brightbrown": "bright_yellow"}
_SGR = re.compile(rb"\x1b\[([\d;]*)m")
_GREY = b"38;5;245"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run the short quickstart")
    parser.add_argument("--run", type=Path, help="a run of this command before, which is drawn again")
    options = parser.parse_args()
    folder = options.run or ROOT / "runs" / "pictures"
    if options.run is None:
        if folder.exists():
            sys.exit(f"{folder} is there already: remove it, or draw it with --run {folder}")
        words = ["--smoke"] if options.smoke else []
        folder.mkdir(parents=True)
        script = str(ROOT / "examples" / "quickstart.py")
        said = run_in_terminal([sys.executable, script, *words, "--out", os.path.relpath(folder, ROOT)])
        (folder / "transcript.bin").write_bytes(said)
    command = "make smoke" if (folder / "copy.jsonl").exists() else "make quickstart"
    PICTURES.mkdir(exist_ok=True)
    draw_terminal((folder / "transcript.bin").read_bytes(), command, PICTURES / "terminal.svg")
    curve = build_curve(RunRecord(folder / "grpo").rows)
    assert curve is not None, "the run has no steps"
    with matplotlib.rc_context({"svg.hashsalt": "podium", "svg.fonttype": "path"}):
        plot_curve(curve, PICTURES / "curve.svg", "GRPO")
    sys.stdout.write(f"drew {PICTURES / 'terminal.svg'} and {PICTURES / 'curve.svg'}\n")


def run_in_terminal(command: list[str]) -> bytes:
    """Run a command in a pseudo-terminal of COLUMNS by LINES, and return what it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "SOURCE_DATE_EPOCH": "0"}
    said = bytearray()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the command has closed its end
                break
            said += part
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
    os.close(ours)
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return bytes(said)


def draw_terminal(said: bytes, command: str, path: Path) -> None:
    """Draw what a terminal shows after it was told ``said``."""
    lines = reinforcement(screen_lines(said))
    if len(lines) > FIRST + LAST:
        lines[FIRST:-LAST] = [Text("      ⋮", "dim")]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("Fira Code", "ui-monospace, 'Cascadia Mono', 'DejaVu Sans Mono', Menlo")
    path.write_text(console.export_svg(title="podium", theme=SVG_EXPORT_THEME, code_format=plain, unique_id="podium"))


def reinforcement(lines: list[Text]) -> list[Text]:
    """The lines from the start of GRPO to the end of its curve, without the warm-up before and the paths after."""
    phases = [at for at, line in enumerate(lines) if line.plain.startswith("grpo  ")]
    lines = lines[phases[-1] if phases else 0 :]
    paths = [at for at, line in enumerate(lines) if re.match(r"  run\s", line.plain)]
    lines = lines[: paths[-1] if paths else len(lines)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def screen_lines(said: bytes) -> list[Text]:
    """The lines of a terminal, those that have scrolled away included."""
    screen = pyte.HistoryScreen(COLUMNS, LINES, history=10_000, ratio=1)
    pyte.ByteStream(screen).feed(_SGR.sub(_without_faint, said))
    rows = [*screen.history.top, *(screen.buffer[at] for at in range(LINES))]
    return [_line([row[at] for at in range(COLUMNS)]) for row in rows]


def _line(chars: list[Char]) -> Text:
    runs = groupby(chars, style_of)
    return Text.assemble(*(("".join(char.data for char in run), style) for style, run in runs))


def style_of(char: Char) -> Style:
    """The style of a character on the screen."""
    color = _COLORS.get(char.fg, char.fg)
    if color is not None and re.fullmatch(r"[0-9a-f]{6}", color):
        color = f"#{color}"
    elif color is not None and color.startswith("bright") and not color.startswith("bright_"):
        color = f"bright_{color.removeprefix('bright')}"
    return Style(
        color=color,
        bold=char.bold or None,
        italic=char.italics or None,
        underline=char.underscore or None,
        reverse=char.reverse or None,
    )


def _without_faint(found: re.Match[bytes]) -> bytes:
    """The same escape sequence with grey in place of faint, which pyte does not know."""
    words, kept, faint, colored = found[1].split(b";"), [], False, False
    at = 0
    while at < len(words):
        taken = {b"5": 3, b"2": 5}.get(words[at + 1], 1) if words[at] in (b"38", b"48") and at + 1 < len(words) else 1
        one = words[at : at + taken]
        faint |= one == [b"2"]
        colored |= len(one[0]) == 2 and one[0][:1] in (b"3", b"9")
        kept += [] if one == [b"2"] else one
        at += taken
    if faint and not colored:
        kept.append(_GREY)
    return b"\x1b[" + b";".join(kept) + b"m" if kept else b""


if __name__ == "__main__":
    main()
