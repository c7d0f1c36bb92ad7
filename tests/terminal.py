"""A real terminal, read by pyte: what a person sees of a Python process."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pyte

from tests.warm_python import WarmPopen

__all__ = ["in_pty"]


def in_pty(
    *arguments: str, cwd: Path | None = None, width: int = 80, height: int = 24, typed: tuple[str, bytes] = ("", b"")
) -> list[str]:
    """What stands on a terminal of this size, and above it, once Python has ended that was run with ``arguments``.

    The keys in ``typed`` are pressed when its text is on the screen.
    """
    text, keys = typed
    seen = pyte.HistoryScreen(width, height, history=1000, ratio=1)
    stream = pyte.ByteStream(seen)
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES", "CI")}
    child = WarmPopen(
        [sys.executable, *arguments],
        stdin=other,
        stdout=other,
        stderr=other,
        cwd=cwd,
        env={**env, "TERM": "xterm-256color"},
    )
    os.close(other)
    with suppress(OSError):  # Linux says EIO once the other end is closed
        while data := os.read(main, 65536):
            stream.feed(data)
            if keys and text in "".join(seen.display):
                os.write(main, keys)
                keys = b""
    os.close(main)
    above = ["".join(line[place].data for place in range(width)) for line in seen.history.top]
    lines = [line.rstrip() for line in (*above, *seen.display)]
    assert child.wait() == 0, "\n".join(lines)
    return lines
