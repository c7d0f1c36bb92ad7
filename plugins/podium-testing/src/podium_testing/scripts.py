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

from podium.processes import descendants_of, is_stopped, kill
from podium.runtime import Cluster
from podium.runtime.calls.stacks import outside_stack
from podium_testing.target import Target, all_gone, need, time_limit, wait_for

__all__ = ["ScriptContract"]

LIMIT_S = 200.0
"""The script has at least these seconds, also where a test has less."""
STOPPED_S = 2.0  # for which a signal stops the script: no time after which it may be taken for one that ended
END_S = 5.0  # for processes that clean up after a killed script
SAID_S = 60.0  # for what a worker printed to appear
GONE_S = 60.0
"""The promise is two seconds on a machine that does nothing else."""
LINES = 300
"""Lines that each rank prints one after another."""
BEFORE = """
import signal

def handle(number, frame):
    pass

mine = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM]
former = [signal.signal(number, handle) for number in mine]
"""
SCRIPT = """
import os, signal, subprocess, sys, time

print("SIGNALS", *[number.name for number in mine if signal.getsignal(number) != handle], "end", flush=True)
for number, handler in zip(mine, former):
    signal.signal(number, handler)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs begin
    signal.signal(signal.SIGINT, signal.default_int_handler)

def say(worker):
    print("said by rank", worker.ctx.rank, flush=True)
    for at in range({lines}):
        print("line", at, "of rank", worker.ctx.rank, flush=True)
    os.write(1, b"written by rank %d\\n" % worker.ctx.rank)
    subprocess.run(["/bin/sh", "-c", f"echo printed by a child of rank {{worker.ctx.rank}}"], check=True)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    return os.getpid(), child.pid

def work(worker, seconds):
    time.sleep(seconds)
    return "done"

group = cluster.start(podium.Worker.bind(), cluster.pool([2]), name="talker", distributed=False).group
pids = [pid for pair in group.run(say) for pid in pair]
other = cluster.start(podium.Worker.bind(), name="other", distributed=False).group
other.run(lambda worker: print("long", "x" * 100_000))
other.run(lambda worker: print("not flushed by the worker"))
other.close()
if (fork := os.fork()) == 0:
    sys.exit()  # with all that Python does at its end
deadline = time.monotonic() + 10  # what the backend brings along may hang at the end of a fork, as Ray does
while os.waitpid(fork, os.WNOHANG) == (0, 0):
    if time.monotonic() > deadline:
        os.kill(fork, signal.SIGKILL)
    time.sleep(0.01)
print("FORKED", *group.run(work, 0), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("CONTINUED", *group.run(work, 0), flush=True)
try:
    print("PIDS", *pids, flush=True)
    while True:  # Python sees a signal that comes just before a sleep only when that sleep has ended
        time.sleep(0.1)
except KeyboardInterrupt:
    if os.fork() == 0:  # whatever it has of the script, it is not the script
        while True:
            time.sleep(600)
    print("AFTER", *group.run(work, 0), flush=True)
group.run(work, 600)
"""


class Seen(NamedTuple):
    """What a script and its workers did.

    Attributes:
        lines: All that was printed.
        forked: What the workers answered after a fork of the script had ended.
        continued: What the workers answered after a signal had stopped the script for a while, as Ctrl-Z does.
        signals: The signals that the script does not handle any more since it has connected.
        after: What the workers answered after a Ctrl-C in the terminal.
        left: Processes of workers, and their children, that were there after the script had been killed.
    """

    lines: list[str]
    forked: str
    continued: str
    signals: str
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

    def test_all_that_workers_print_appears_in_order(self, script: Seen, target: Target) -> None:
        """Whatever prints it: Python, a library, or a child. A worker need not flush."""
        if "log_dir" in target.options:
            pytest.skip("the output goes to log_dir")
        for rank in range(2):
            printed = [line for line in script.lines if line.endswith(f" of rank {rank}") and "] line " in line]
            assert [line.split()[-4] for line in printed] == [str(at) for at in range(LINES)]
            for words in (f"written by rank {rank}", f"printed by a child of rank {rank}"):
                assert sum(line.endswith(words) and f"talker-{rank}" in line for line in script.lines) == 1, words
        assert sum(line.endswith("long " + "x" * 100_000) for line in script.lines) == 1
        assert sum(line.endswith("not flushed by the worker") for line in script.lines) == 1

    def test_a_fork_of_the_script_that_ends_leaves_the_workers_alone(self, script: Seen) -> None:
        assert script.forked == "done done", "\n".join(script.lines)

    def test_a_script_that_a_signal_stops_keeps_its_workers(self, script: Seen) -> None:
        assert script.continued == "done done", "\n".join(script.lines)

    def test_the_scripts_handlers_of_signals_stay(self, script: Seen) -> None:
        assert script.signals == "end"

    def test_a_terminals_ctrl_c_does_not_reach_the_workers(self, script: Seen) -> None:
        assert script.after == "done done", "\n".join(script.lines)

    def test_workers_and_their_children_end_with_a_script_that_is_killed(self, script: Seen) -> None:
        assert not script.left


def _run(target: Target, directory: Path) -> Seen:
    script = target.run_script(directory, SCRIPT.format(lines=LINES), BEFORE)
    lines: list[str] = []
    everything: list[int] = []
    Thread(target=_read, args=(script, lines), daemon=True).start()
    try:
        signals, forked = (_after(word, script, lines) for word in ("SIGNALS ", "FORKED "))
        wait_for(lambda: is_stopped(script.pid) or script.poll() is not None, SAID_S)
        time.sleep(STOPPED_S)
        script.send_signal(signal.SIGCONT)
        continued = _after("CONTINUED ", script, lines)
        pids = [int(word) for word in _after("PIDS ", script, lines).split()]
        assert len(pids) == 4, "\n".join(lines)
        wait_for(lambda: sum("said by rank" in line for line in lines) == 2, SAID_S)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        after = _after("AFTER ", script, lines)
        everything = descendants_of(script.pid)
        script.kill()
        return Seen(lines, forked, continued, signals, after, all_gone(pids, GONE_S))
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
