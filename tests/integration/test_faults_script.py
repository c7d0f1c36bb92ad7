"""The script itself dies, is interrupted, forgets to close, or is written as scripts are written."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podium.processes import kill
from tests.integration.processes import all_gone, run_script, start_script, wait_for

GONE_S = 60.0  # the promise is 2 s, on a machine that does nothing else
BUSY = """
import os, subprocess, sys, time
import podium
from podium.runtime import Worker, endpoint

class Busy(Worker):
    @endpoint
    def descend(self) -> list[int]:
        plain = subprocess.Popen(["sleep", "600"]).pid
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        orphan = subprocess.run(["sh", "-c", "setsid sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True)
        return [os.getpid(), os.getppid(), plain, own_session, int(orphan.stdout)]

    @endpoint
    def work(self, seconds: float = 600) -> str:
        time.sleep(seconds)
        return "done"

"""
STARTED = """
cluster = podium.connect("local", preload=[])
busy = cluster.start(Busy.bind(), cluster.pool([2]))
pids = sorted({pid for rank in busy.descend() for pid in rank})
print(*pids, flush=True)
"""


def read_pids(script: subprocess.Popen[str]) -> list[int]:
    assert script.stdout is not None
    return [int(word) for word in script.stdout.readline().split()]


def finish(script: subprocess.Popen[str]) -> int:
    """Its exit status; what it left behind is killed so that a failed test leaves nothing."""
    try:
        return script.wait(60.0)
    finally:
        script.kill()
        script.communicate()


def left_over(directory: Path) -> list[str]:
    """What is left of the private directory, whose place the script's TMPDIR says."""
    return sorted(path.name for path in (directory / "tmp").iterdir())


@pytest.mark.everyday("<&- >&- 2>&-")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_workers_start_from_a_script_whose_streams_are_closed(tmp_path: Path, closed: str) -> None:
    """The null device takes the place of a closed stream, so that no socket gets its number."""
    out = tmp_path / "out"
    speaking = """
with podium.connect("local", preload=[]) as cluster:
    cluster.start(Busy.bind(), cluster.pool([2])).work(0.01)
print("said to nobody", flush=True)
"""
    end = f"""
import pathlib, stat
kinds = [stat.S_ISSOCK(os.fstat(number).st_mode) for number in range(3)]
pathlib.Path({str(out)!r}).write_text(str(kinds))
"""
    words = run_with_closed(closed, BUSY + speaking + end, tmp_path)
    assert out.exists(), words
    assert out.read_text() == "[False, False, False]"


def run_with_closed(closed: str, text: str, directory: Path) -> str:
    """Run a script some of whose streams are closed, and return what it wrote to the others."""
    script, words = directory / "script.py", directory / "words"
    script.write_text(text)
    with words.open("w") as others:
        line = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(script))} {closed}"
        subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, stdout=others, stderr=others, check=False)
    return words.read_text()


@pytest.mark.everyday("<&- >&- 2>&-", "closes the descriptor")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "closes", "closes the descriptor"])
def test_files_in_the_place_of_closed_streams_are_the_scripts_alone(tmp_path: Path, closed: str) -> None:
    """The script opens files before it connects, which get the numbers of the streams. Its workers print to their log,
    whether they start from the fork server or in a new interpreter."""
    before = f"""
import os, sys
{"sys.stdout.close()" if closed == "closes" else "os.close(1)" if closed == "closes the descriptor" else ""}
files = [open({str(tmp_path)!r} + f"/{{number}}", "w") for number in range(3)]
"""
    speaking = f"""
class Speaking(Worker):
    @endpoint
    def speak(self) -> None:
        print("said", flush=True)
        print("wrong", file=sys.stderr, flush=True)
        subprocess.run(["echo", "below"], check=True)

for name, env in (("forked", {{}}), ("new", {{"OMP_SCHEDULE": "static"}})):
    with podium.connect("local", preload=[], log_dir={str(tmp_path)!r}) as cluster:
        cluster.start(Speaking.bind(), cluster.pool([1]), name=name, env=env).speak()
for file in files:
    file.write("its own")
"""
    words = run_with_closed("" if "closes" in closed else closed, before + BUSY + speaking, tmp_path)
    assert [(tmp_path / str(number)).read_text() for number in range(3)] == ["its own"] * 3, words
    logs = [(tmp_path / f"{name}-0.log").read_text() for name in ("forked", "new")]
    assert logs == ["said\nwrong\nbelow\n"] * 2


@pytest.mark.parametrize("how", ["script", "process group", "os._exit", "while starting"])
def test_a_script_that_dies_takes_everything_with_it(tmp_path: Path, how: str) -> None:
    """Workers, the fork server, and grandchildren: in the worker's session, in sessions of their own, and orphaned."""
    ending = {
        "os._exit": "call = busy.work.submit()\nos._exit(0)\n",
        "while starting": "cluster.start(Busy.bind(), cluster.pool([8]))\ntime.sleep(600)\n",
    }
    script = start_script(tmp_path, BUSY + STARTED + ending.get(how, "busy.work()\n"))
    try:
        pids = read_pids(script)
        assert len(pids) >= 9
        if how == "process group":
            os.killpg(script.pid, signal.SIGKILL)
        elif how != "os._exit":
            time.sleep(0.0 if how == "while starting" else 0.2)
            script.kill()
        assert not all_gone([script.pid, *pids], GONE_S)
        assert wait_for(lambda: not left_over(tmp_path), GONE_S), left_over(tmp_path)
    finally:
        finish(script)


def test_a_child_of_the_script_that_lives_on_does_not_keep_the_workers(tmp_path: Path) -> None:
    """A fork holds copies of every socket, so that their end of file never comes."""
    text = BUSY + STARTED + "child = os.fork()\nif child:\n    print(child, flush=True)\ntime.sleep(600)\n"
    script = start_script(tmp_path, text)
    child = 0
    try:
        pids = read_pids(script)
        (child,) = read_pids(script)
        script.kill()
        assert not all_gone([script.pid, *pids], GONE_S)
        assert wait_for(lambda: not left_over(tmp_path), GONE_S)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        finish(script)


def test_a_fork_of_the_script_harms_nothing_and_is_told_what_to_do(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
import os, sys, podium, podium.errors
from podium_testing.workers import Sleeper
with podium.connect("local", preload=[]) as cluster:
    sleeper = cluster.start(Sleeper.bind(), start_timeout_s=float("inf"))
    call = sleeper.double.submit(1)
    if not (child := os.fork()):
        for use in (lambda: sleeper.double(2), call.result, sleeper.group.restart, cluster.pool):
            try:
                use()
            except podium.errors.ConfigError as error:
                print("a fork of it" in str(error), flush=True)
        sleeper.group.close()
        sys.exit(0)  # its atexit functions run
    print(os.waitpid(child, 0)[1], call.result(float("inf")), sleeper.double(3), flush=True)
""",
    )
    assert out == "True\nTrue\nTrue\nTrue\n0 [2] [6]\n"


@pytest.mark.parametrize("ending", ["", "raise LookupError('mine')", "sys.exit(3)"], ids=["end", "error", "exit"])
def test_a_script_that_forgets_to_close_ends_and_leaves_nothing(tmp_path: Path, ending: str) -> None:
    script = start_script(tmp_path, BUSY + STARTED + ending + "\n")
    pids = read_pids(script)
    assert finish(script) == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert not all_gone(pids, GONE_S)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_script_ends_with_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    text = BUSY + STARTED.replace("cluster = podium", "with podium").replace(")\nbusy", ") as cluster:\n  busy")
    text = text.replace("\npids", "\n  pids").replace("\nprint(*pids", "\n  print(*pids") + "  busy.work()\n"
    script = start_script(tmp_path, text)
    pids = read_pids(script)
    time.sleep(0.2)
    os.killpg(script.pid, number)  # as a terminal does
    assert finish(script) != 0
    assert not all_gone(pids, GONE_S)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in (tmp_path / "stderr").read_text()
        assert left_over(tmp_path) == []


def test_after_ctrl_c_an_interactive_session_goes_on(tmp_path: Path) -> None:
    text = (
        BUSY
        + STARTED
        + """
path = os.path.join(sys.path[0], "open")

def wait_for_file(worker):
    while not os.path.exists(path):
        time.sleep(0.01)
    return "done"

call = busy.group.function(wait_for_file).submit()
try:
    print("submitted", flush=True)
    call.result()
except KeyboardInterrupt:
    print("interrupted", call.done(), flush=True)
open(path, "w").close()
print(call.result(), busy.work(0.0), flush=True)
cluster.close()
"""
    )
    script = start_script(tmp_path, text)
    read_pids(script)
    assert script.stdout is not None
    assert script.stdout.readline() == "submitted\n"
    time.sleep(0.2)  # by then it waits for the result
    os.killpg(script.pid, signal.SIGINT)
    assert script.stdout.readline() == "interrupted False\n", "workers ignore the terminal's Ctrl-C"
    assert script.stdout.readline() == "['done', 'done'] ['done', 'done']\n"
    assert finish(script) == 0


def test_two_scripts_at_once(tmp_path: Path) -> None:
    text = BUSY + "with podium.connect('local', preload=[]) as cluster:\n"
    text += "    busy = cluster.start(Busy.bind(), cluster.pool([2]), name='same_name')\n"
    text += "    print(busy.work(0.2), flush=True)\n"
    scripts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        scripts.append(start_script(tmp_path / name, text))
    for name, script in zip(("one", "two"), scripts, strict=True):
        out, _ = script.communicate(timeout=200)
        assert (script.returncode, out) == (0, "['done', 'done']\n")
        assert left_over(tmp_path / name) == []


def test_workers_outlive_the_thread_that_connected(tmp_path: Path) -> None:
    """The parent-death signal fires when the *thread* that forked ends; no worker may notice."""
    out = run_script(
        tmp_path,
        BUSY
        + """
import threading
found = {}
def connect():
    found["cluster"] = cluster = podium.connect("local", preload=[])
    found["busy"] = cluster.start(Busy.bind(), cluster.pool([2]))
    found["fresh"] = cluster.start(Busy.bind(), cluster.pool([1]), env={"OMP_NUM_THREADS": "1"})
thread = threading.Thread(target=connect)
thread.start()
thread.join()
time.sleep(0.5)
print(found["busy"].work(0.0), found["fresh"].work(0.0))
found["busy"].group.restart()
print(found["busy"].work(0.0))
found["cluster"].close()
""",
    )
    assert out == "['done', 'done'] ['done']\n['done', 'done']\n"


NOTEBOOK = """
import podium
from dataclasses import dataclass
from podium.runtime import Worker, endpoint, colocate

@dataclass
class Setting:
    factor: int

def helper(x):
    return x + OFFSET

OFFSET = 100

class Inner(Worker):
    @endpoint
    def value(self) -> int:
        return 1

class Cell(Worker):
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.inner = Inner()

    @endpoint
    def times(self, x: int) -> Setting:
        return Setting(helper(x) * self.setting.factor + self.inner.value())

cluster = podium.connect("local", preload=[])
cell = cluster.start(Cell.bind(Setting(2)), cluster.pool([2]))
results = cell.times(1)
assert [type(result) is Setting for result in results] == [True, True], results
print([result.factor for result in results], cell.group.run(lambda worker: worker.ctx.rank + OFFSET))
cluster.close()
"""


@pytest.mark.everyday("script", "stdin")
@pytest.mark.parametrize("how", ["script", "stdin", "-c", "exec in __main__"])
def test_classes_of_main_travel_by_value_and_need_no_guard(tmp_path: Path, how: str) -> None:
    expected = "[203, 203] [100, 101]\n"
    if how == "script":
        assert run_script(tmp_path, NOTEBOOK) == expected
    elif how == "exec in __main__":  # a notebook's cells
        assert (
            run_script(tmp_path, f"for cell in {NOTEBOOK!r}.split('NEXT CELL'):\n    exec(cell, globals())\n")
            == expected
        )
    else:
        # New interpreters: a warm process reads no program from its standard input, and one "-c" is a real one.
        command = [sys.executable, "-"] if how == "stdin" else [sys.executable, "-c", NOTEBOOK]
        done = subprocess.run(command, input=NOTEBOOK, capture_output=True, text=True, timeout=200, check=False)
        assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def test_working_directory_and_path_follow(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_workers.py").write_text(
        "from podium.runtime import Worker, endpoint\nimport os\n"
        "class Mine(Worker):\n    @endpoint\n    def where(self):\n        return os.getcwd()\n"
    )
    out = run_script(
        tmp_path,
        f"""
import os, pathlib, sys
sys.path.insert(0, {str(tmp_path / "mine")!r})
sys.path.append(pathlib.Path("no text, so Python does not look there"))
os.chdir({str(tmp_path)!r})
import podium, my_workers
with podium.connect("local", preload=[]) as cluster:
    print(cluster.start(my_workers.Mine.bind()).where())
    os.chdir("mine")
    print(cluster.start(my_workers.Mine.bind(), env={{"OMP_NUM_THREADS": "1"}}).where())
""",
    )
    assert out == f"['{tmp_path}']\n['{tmp_path}/mine']\n"


BLOCKS = """
import pathlib, time
folder = pathlib.Path(__file__).parent
(folder / "importing").touch()
while not (folder / "go").exists():  # which nobody makes
    time.sleep(0.01)
"""
FORK_SERVER = """
from podium.backends.local import LocalBackend
LocalBackend.prepare(["blocks"])
(_, server), = LocalBackend._prepared.values()
print(server.process.pid, flush=True)
time.sleep(600)
"""
DISPATCHER = """
import threading
from podium.rewards import Grader, RewardConfig
threading.Thread(target=Grader(RewardConfig(name="blocks:reward")).start, daemon=True).start()
from podium.processes import children_of
while not (pids := children_of(os.getpid())):
    time.sleep(0.01)
print(*pids, flush=True)
time.sleep(600)
"""


@pytest.mark.each_value
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("kind", [FORK_SERVER, DISPATCHER], ids=["fork_server", "dispatcher"])
def test_a_server_ends_with_its_script_in_the_middle_of_an_import(
    kind: str, end: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS)
    script = start_script(tmp_path, "import os, time\n" + kind, warm=False)  # a warm server has imported already
    pids: list[int] = []
    try:
        pids += read_pids(script)
        assert wait_for(lambda: (tmp_path / "importing").exists(), GONE_S)
        script.send_signal(end)
        script.wait(60.0)
        assert not all_gone(pids, GONE_S), "the import never ends, and the server waits for it"
        assert left_over(tmp_path) == []
    finally:
        script.kill()
        script.communicate()
        for pid in pids:
            kill(pid)
