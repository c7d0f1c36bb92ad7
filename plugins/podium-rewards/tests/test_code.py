"""Code by unit tests: what passes, and what a solution tries in order to pass without solving anything."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.processes import descendants_of
from podium.rewards import Grader, RewardConfig

check_code = pytest.importorskip("podium_rewards").check_code
sandbox = importlib.import_module("podium_rewards.sandbox")
find_code = importlib.import_module("podium_rewards.unit_tests").find_code

has_sandbox = shutil.which("bwrap") is not None
pytestmark = pytest.mark.skipif(not has_sandbox, reason="bubblewrap is not installed: apt-get install bubblewrap")

DOUBLE = {"tests": ["assert double(2) == 4", "assert double(3) == 6", "assert double(-1) == -2"]}
ECHO = {"tests": [{"input": "1\n", "output": "2"}, {"input": "5\n", "output": "6"}]}


STACK = """
class Stack:
    def __init__(self): self.x = []
    def push(self, a): self.x.append(a)
    def top(self): return self.x[-1]
"""
FORKS = """
import os, time
for _ in range(4):
    if os.fork() == 0: break
x = [bytearray(60 << 20)]
time.sleep(99)
"""
THREADS = """
import threading, time
while True: threading.Thread(target=time.sleep, args=(99,)).start()
"""
ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(999)
while True: pass
"""


def run(code: str, row: Any, **options: Any) -> dict[str, Any]:
    """The score of code that is no secret, with a limit of time that a busy machine keeps."""
    return dict(check_code(**{"partial": True, "time_limit_s": 60.0, **options})(f"```python\n{code}\n```", row))


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("def double(x):\n    return 2 * x", DOUBLE),
        ("def add(a, b):\n    return a + b", {"test_list": ["assert add(2, 3) == 5"]}),
        (
            "def add(a, b):\n    return a + b",
            {"test": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"},
        ),
        ("print(int(input()) + 1)", ECHO),
        ("import sys\nprint(int(sys.stdin.read()) + 1)", {"input_output": {"inputs": ["1"], "outputs": ["2\n"]}}),
        (
            "class Solution:\n    def two(self, a, b):\n        return (a, b)",
            {"input_output": '{"fn_name": "two", "inputs": [[1, 2]], "outputs": [[1, 2]]}'},
        ),
        ("def f(n):\n    raise KeyError", {"tests": "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert 0"}),
        ("def f():\n    return {1: (2, {3}), 'a': [None, True, b'x', 1.5]}",
         {"tests": ["assert f() == {1: (2, {3}), 'a': [None, True, b'x', 1.5]}"]}),
        (STACK, {"tests": ["s = Stack()\ns.push(3)\nassert s.top() == 3"]}),
        ("import math\ndef area(r): return math.pi * r * r", {"tests": ["assert math.isclose(area(1), math.pi)"]}),
    ],
)  # fmt: skip
def test_what_solves_the_tests_passes(code: str, row: Any) -> None:
    assert run(code, row) == {"score": 1.0, "passed": 1.0}


def test_the_score_is_a_verdict_or_the_share_of_tests() -> None:
    code = "def double(x):\n    return x * x"
    assert run(code, DOUBLE)["score"] == pytest.approx(1 / 3)
    result = run(code, DOUBLE, partial=False)
    assert (result["score"], result["passed"]) == (0.0, pytest.approx(1 / 3))


ALWAYS = "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
CHEATS = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit with a faked verdict": 'import os\nos.write(1, b\'{"passed": 3, "problem": ""}\')\nos._exit(0)',
    "verdict to every descriptor": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"passed\": 3}')\n"
    "    except OSError: pass\nos._exit(0)",
    "equal to everything": f"{ALWAYS}def double(x): return Yes(0)",
    "an object equal to everything": f"{ALWAYS}def double(x): return [Yes(0)]",
    "patched builtins": "import builtins\nbuiltins.AssertionError = BaseException\nbuiltins.eval = print\n"
    "def double(x): return 0",
    "a check of its own": "def check(candidate): pass\ndef double(x): return 0",
    "patched tests": "import sys\nfor m in [*sys.modules.values()]:\n    if hasattr(m, 'test'): m.test = lambda *_: 3\n"
    "def double(x): return 0",
    "patched frames": "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['test'] = lambda *_: {'passed': 3}\n"
    "    f = f.f_back\ndef double(x): return 0",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef double(x): return 0",
    "a thread that kills": "import os, threading, signal\nthreading.Thread(target=lambda: os.kill(-1, 9)).start()\n"
    "def double(x): return 0",
    "the right answer read of the tests": "import glob, gc\ndef double(x):\n"
    "    return [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o][0]",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_solution_that_cheats_fails(cheat: str) -> None:
    assert run(CHEATS[cheat], DOUBLE)["score"] == 0.0


def test_names_of_python_and_of_libraries_are_those_of_the_tests() -> None:
    code = "class math:\n    isclose = lambda *a: True\nall = lambda _: True\ndef f(x): return 0"
    row = {"tests": ["assert math.isclose(f(1), 1)", "assert all(f(x) == x for x in (1, 2))"]}
    assert run(code, row)["score"] == 0.0


def test_a_loop_of_the_tests_is_not_ended_by_the_solution() -> None:
    code = "def is_even(x):\n    raise StopIteration"
    assert run(code, {"tests": ["assert all(map(is_even, [2, 4]))"]})["score"] == 0.0


def test_an_exception_without_a_text_is_one_failed_test() -> None:
    code = "class Odd(Exception):\n    def __str__(self): raise self\n"
    code += "def double(x):\n    if x < 2: raise Odd\n    return 2 * x"
    row = {"tests": ["assert double(1) == 2", "assert double(2) == 4"]}
    assert run(code, row)["score"] == 0.5
    assert run(code.replace("def double(x):", "raise Odd\ndef double(x):"), row)["score"] == 0.0


def test_a_script_that_writes_verdicts_fails() -> None:
    code = 'import os\nprint(2)\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"status": 0, "output": "6"}\\n\')\n'
    code += "    except OSError: pass"
    assert run(code, ECHO)["score"] == 0.0
    assert run("import sys\nprint(int(input()) + 1)\nsys.exit(3)", ECHO)["score"] == 0.0


def test_it_reads_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    homes = [str(tmp_path / "secret"), os.path.expanduser("~/.bashrc"), "/etc/passwd", "/proc/self/environ"]
    code = "import os\nprint([os.path.exists(p) for p in " + repr(homes) + "], len(os.environ) < 6)"
    row = {"tests": [{"input": "", "output": "[False, False, False, False] True"}]}
    assert run(code, row)["score"] == 1.0


def test_it_writes_no_file_outside(tmp_path: Path) -> None:
    target = tmp_path / "written"
    code = f"for path in ({str(target)!r}, '/x', '/dev/x', '/usr/x', '/etc/x'):\n"
    code += "    try: open(path, 'w').write('x'); print(path)\n    except OSError: pass\n"
    code += "open('/tmp/podium-written', 'w').write('x')\nprint('ended')"
    assert run(code, {"tests": [{"input": "", "output": "ended"}]})["score"] == 1.0
    assert not target.exists() and not Path("/tmp/podium-written").exists()


def test_it_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', %d), 1)\n    print('reached')\n"
        code = code % server.getsockname()[1] + "except OSError:\n    print('refused')"
        assert run(code, {"tests": [{"input": "", "output": "refused"}]})["score"] == 1.0
        with pytest.raises(TimeoutError):
            server.accept()


def test_it_does_not_fill_the_disk() -> None:
    code = (
        "n = 0\nwhile True:\n    try:\n        open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))\n    except OSError:\n"
    )
    code += "        break\n    n += 1\nimport os\nos.remove('/tmp/0')\nprint(n <= 64)"
    assert run(code, {"tests": [{"input": "", "output": "True"}]})["score"] == 1.0


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes"),
        (THREADS, "processes"),
        (FORKS, "memory"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
    ],
)  # fmt: skip
def test_it_runs_over_no_limit(code: str, limit: str) -> None:
    options = {"memory_mib": 128} if limit == "memory" else {}
    for row in (DOUBLE, ECHO) if limit != "output" else (ECHO,):
        result = run(code, row, **options)
        assert result["score"] == 0.0
        assert any(word in result["failed"] for word in (limit, "can't start new thread", "status"))


def test_a_loop_without_end_is_killed_with_all_that_it_started() -> None:
    assert "time" in run(ORPHAN, DOUBLE, time_limit_s=2.0)["failed"]
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants_of(os.getpid())]
    assert not [command for command in commands if b"sandbox_program" in command]


def test_memory_that_one_process_takes_ends_the_test_and_not_the_grader() -> None:
    assert "MemoryError" in run("x = bytearray(1 << 32)\ndef double(x): return 2 * x", DOUBLE)["failed"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\na = 1\n```\nand better:\n```py\na = 2\n```\n```\noutput\n```", "a = 2\n"),
        ("```\na = 3\n```", "a = 3\n"),
        ("a = 4", "a = 4"),
        ("```python\na = 5", "a = 5"),
    ],
)
def test_the_code_is_the_last_block_of_python(text: str, code: str) -> None:
    assert find_code(text) == code


def test_a_missing_sandbox_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.check_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r'apt-get install bubblewrap.*sandbox="none"'):
        check_code()
    assert run("def double(x):\n    return 2 * x", DOUBLE, sandbox="none")["score"] == 1.0
    sandbox.check_sandbox.cache_clear()


def test_data_without_tests_are_refused_before_the_start() -> None:
    with (
        pytest.raises(ConfigError, match="finds no tests"),
        Grader(RewardConfig(name="code"), columns=["prompt"], in_script=True) as grader,
    ):
        grader.start()
    with (
        pytest.raises(RewardError, match="has no tests that can be read"),
        Grader(RewardConfig(name="code"), in_script=True) as grader,
    ):
        grader.grade(["x"], [{"tests": [{"given": 1}]}])


def test_a_limit_that_the_grader_would_cut_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"reward\.time_limit_s 11"),
        Grader(reward=check_code(time_limit_s=10), columns=["tests"], in_script=True) as grader,
    ):
        grader.start()
