"""Contract: the script whose output, Ctrl-C and end concern its worker processes. Runs once, for several tests."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import ClassVar, NamedTuple

import pytest

from podium.processes import descendants_of, kill
from podium.runtime import Cluster
from podium.runtime.calls.stacks import outside_stack
from podium_testing.target import Target, all_gone, need, time_limit, wait_for

__all__ = ["ScriptContract"]

LIMIT_S = 200.0
"""The script has at least these seconds, also where a test has less."""
END_S = 5.0  # for processes that clean up after a killed script
SAID_S = 60.0  # for what a worker printed to appear
GONE_S = 60.0
"""The promise is two seconds on a machine that does nothing else."""
SCRIPT = """
import os, signal, subprocess, sys, time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs begin
    signal.signal(signal.SIGINT, signal.default_int_handler)

def say(worker):
    print("said by rank", worker.ctx.rank, flush=True)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    return os.getpid(), child.pid

def work(worker, seconds):
    time.sleep(seconds)
    return "done"

group = cluster.start(podium.Worker.bind(), cluster.pool([2]), name="talker", distributed=False).group
pids = [pid for pair in group.run(say) for pid in pair]
try:
    print("PIDS", *pids, flush=True)
    while True:  # Python sees a signal that comes just before a sleep only when that sleep has ended
        time.sleep(0.1)
except KeyboardInterrupt:
    print("AFTER", *group.run(work, 0), flush=True)
group.run(work, 600)
"""


class Seen(NamedTuple):
    """What a script and its workers did.

    Attributes:
        lines: All that was printed.
        after: What the workers answered after a Ctrl-C in the terminal.
        left: Processes of workers, and their children, that were there after the script had been killed.
    """

    lines: list[str]
    after: str
    left: list[int]


class ScriptContract:
    limit_s: ClassVar[float]

    @pytest.fixture(scope="class")
    @classmethod
    def script(cls, target: Target, cluster: Cluster) -> Seen:
        need(cluster, "processes")
        with tempfile.TemporaryDirectory(prefix="podium-") as directory, time_limit(max(LIMIT_S, cls.limit_s)):
            return _run(target, Path(directory))

    def test_what_workers_print_appears_with_their_names(self, script: Seen, target: Target) -> None:
        if "log_dir" in target.options:
            pytest.skip("the output goes to log_dir")
        for rank in range(2):
            (line,) = [line for line in script.lines if line.endswith(f"said by rank {rank}")]
            assert f"talker-{rank}" in line

    def test_a_terminals_ctrl_c_does_not_reach_the_workers(self, script: Seen) -> None:
        assert script.after == "done done", "\n".join(script.lines)

    def test_workers_and_their_children_end_with_a_script_that_is_killed(self, script: Seen) -> None:
        assert not script.left


def _run(target: Target, directory: Path) -> Seen:
    script = target.run_script(directory, SCRIPT)
    lines: list[str] = []
    everything: list[int] = []
    Thread(target=_read, args=(script, lines), daemon=True).start()
    try:
        pids = [int(word) for word in _after("PIDS ", script, lines).split()]
        assert len(pids) == 4, "\n".join(lines)
        wait_for(lambda: sum("said by rank" in line for line in lines) == 2, SAID_S)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        after = _after("AFTER ", script, lines)
        everything = descendants_of(script.pid)
        script.kill()
        return Seen(lines, after, all_gone(pids, GONE_S))
    except pytest.fail.Exception as late:
        everything = descendants_of(script.pid)
        report = "\n".join(["it has printed:", *lines, "its main thread, innermost first:", outside_stack(script.pid)])
        pytest.fail(f"{late}\n{report}")
    finally:
        script.kill()
        script.wait()
        for pid in all_gone(everything, END_S):  # what a broken backend leaves must not stay on the machine
            kill(pid)


def _read(script: subprocess.Popen[str], lines: list[str]) -> None:
    assert script.stdout is not None
    with script.stdout as stdout:
        for line in stdout:
            lines.append(line.rstrip("\n"))


def _after(word: str, script: subprocess.Popen[str], lines: list[str]) -> str:
    """The rest of the line that begins with ``word``, or "" if the script ends without one."""
    while not (matches := [line.removeprefix(word) for line in [*lines] if line.startswith(word)]):
        if script.poll() is not None:
            return ""
        time.sleep(0.01)
    return matches[0]
