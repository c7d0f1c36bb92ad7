"""A warm process is to a test what a new interpreter is: the same output, the same errors, the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_python import WarmPopen, run_python

PROGRAMS = {
    "what it knows": "import sys; print(sys.argv, sys.orig_argv, sys.path, sys.warnoptions, sorted(globals()))",
    "exit code": "import sys; sys.exit(3)",
    "exit text": "raise SystemExit('said at the end')",
    "exit": "exit()",
    "error": "class A(Exception): pass\ndef f(): raise A('x') from ValueError()\nf()",
    "hook": "import sys; sys.excepthook = lambda *what: print('mine', what[0]); 1 / 0",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "thread": "import threading; threading.Timer(0.1, print, ['from a thread']).start()",
    "own warning": "import warnings; warnings.warn('old', DeprecationWarning)",
    "warning of another": "import warnings; warnings.warn_explicit('old', DeprecationWarning, 'x.py', 1, 'x')",
    "environment": "import os; print(os.environ['MINE'], os.getcwd(), os.getpgid(0) == os.getpid(), os.getppid())",
    "standard input": "print(repr(input()))",
    "descriptors": "import os; print(len([fd for fd in os.listdir('/proc/self/fd') if int(fd) < 64]))",
}


@pytest.mark.each_value
@pytest.mark.parametrize("options", [[], ["-W", "error"]], ids=["plain", "-W error"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_does_what_a_new_interpreter_does(program: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *options, "-c", PROGRAMS[program], "an argument"]
    ends: list[tuple[int, str, str]] = []
    for popen in (WarmPopen, subprocess.Popen):
        with popen(
            command, cwd=tmp_path, env={**os.environ, "MINE": "x", "PYTHONPATH": "/nowhere"}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as process:  # fmt: skip
            out, errors = process.communicate(timeout=60)
        ends.append((process.returncode, out, errors))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("how", ["file", "module"])
def test_a_file_and_a_module_are_main(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys, __main__\nprint(__name__, __file__, sys.argv, sys.path, vars(__main__) is globals())\n1 / 0\n"
    )
    words = ["mine.py", "x"] if how == "file" else ["-m", "mine", "x"]
    real = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    warm = run_python(*words, cwd=tmp_path)
    assert (warm.returncode, warm.stdout, warm.stderr) == (real.returncode, real.stdout, real.stderr)


def test_it_is_a_child_with_its_imports_done_and_ends_with_a_signal() -> None:
    program = "import sys; print('torch' in sys.modules, flush=True); sys.stdin.read()"
    with WarmPopen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert process.poll() is None
        assert f"\nPPid:\t{os.getpid()}\n" in Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_an_option_that_it_does_not_know_is_an_error() -> None:
    assert "does not know the option -I" in run_python("-I", "-c", "pass").stderr
