"""Rewards that daemonize, write to every descriptor, send pickles, look for secrets or eat memory, with real processes.

Each test would fail if its guard were missing: the exploits are those that worked on graders which unpickled results.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.processes import HEADER, make_frame
from podium.rewards import Grade, Grader, RewardConfig
from podium.rewards.grading_process import decode, encode
from podium.rewards.reward_functions import Result
from tests.unit.rewards.deeds import Row, alive_with, family_of, has_variable, misbehave
from tests.waits import LONG_S, grade_undisturbed, wait_until

LIMIT_S = 2.0  # where an item is to pass it; the other items of such a grader take no time


class Bomb:
    """Whoever unpickles it writes its process id to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import os; open({str(self.path)!r}, 'a').write(f'{{os.getpid()}} ')",)

    def __float__(self) -> float:
        return 1.0


@pytest.fixture
def tag() -> Iterator[str]:
    name = f"tag-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    for pid in alive_with(name):
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def grader() -> Iterator[Grader]:
    config = RewardConfig(time_limit_s=LONG_S, on_error="score", failure_score=-1.0, processes=1)
    with Grader(config, reward=misbehave) as made:
        yield made


@pytest.fixture
def impatient() -> Iterator[Grader]:
    config = RewardConfig(time_limit_s=LIMIT_S, on_error="score", failure_score=-1.0, processes=1)
    with Grader(config, reward=misbehave) as made:
        yield made


# -- nothing runs in the controller -----------------------------------------------------------------------------------


def frames_of(payload: bytes, number: int) -> list[bytes]:
    """``payload`` in the framings of readers of pickles, and of this protocol."""
    return [
        payload,
        struct.pack("<Q", len(payload)) + payload,
        make_frame(number, payload),
        struct.pack("!i", len(payload)) + payload,
        b"%d " % number + payload + b"\n",
        b"%d %r\n" % (number, payload),
        b"! " + payload + b"\n",
    ]


def test_a_pickle_sent_through_the_channel_of_results_runs_nowhere(grader: Grader, tmp_path: Path) -> None:
    """Items are counted from 1, and each framing is tried with the number of its item."""
    mark = tmp_path / "ran"
    for framing in range(7):
        data = frames_of(pickle.dumps(Bomb(mark)), 1 + 2 * framing)[framing]
        grade, after = grader.grade(["write", "ok"], [{"data": data}, {}])
        assert (grade.score, after.score) == (-1.0, 1.0), data
        assert grade.error is not None
        assert not mark.exists(), f"the pickle ran in {mark.read_text()}, and this is {os.getpid()}: {data!r}"


def test_a_returned_object_is_reduced_to_a_number_and_never_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    def bombs(completion: str, row: Row) -> Any:
        bomb = Bomb(mark)
        return {"plain": bomb, "part": {"score": bomb}, "key": {bomb: 1.0}, "list": [bomb]}[completion]

    with Grader(RewardConfig(on_error="score"), reward=bombs) as grader:
        grades = grader.grade(["plain", "part", "key", "list"], [{}] * 4)
    assert [grade.score for grade in grades] == [1.0, 1.0, 0.0, 0.0]
    assert type(grades[0].score) is float
    assert not mark.exists()


def test_an_exception_is_carried_as_text(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Explosive(Exception):
        def __reduce__(self) -> tuple[Any, ...]:
            return Bomb(mark).__reduce__()

    def explode(completion: str, row: Row) -> float:
        raise Explosive("of no use")

    with Grader(reward=explode) as grader, pytest.raises(RewardError, match="raised Explosive: of no use"):
        grader.grade([""], [{}])
    assert not mark.exists()


def test_a_row_is_unpickled_in_the_grading_process_alone(grader: Grader, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    grader.grade(["ok"], [{"bomb": Bomb(mark)}])
    assert str(os.getpid()) not in mark.read_text().split()


def test_an_import_that_answers_for_the_dispatcher_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "hostile.py").write_text(
        "import os\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        f"        os.write(int(fd), {pickle.dumps(Bomb(mark))!r} + b'\\n')\n"
        "    except OSError:\n"
        "        pass\n"
        "def score(text, row): return 1.0\n"
    )
    with Grader(RewardConfig(name=f"{tmp_path}/hostile.py:score")) as grader, pytest.raises(RewardError):
        grader.grade(["ok"], [{}])
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"1",
        b"true",
        b'"1.0"',
        b"NaN",
        b"1e999",
        b"[1.0]",
        b'["p", "", ""',
        b'["p", "", "", ""]',
        b'["p", null, ""]',
        b'[3, "", ""]',
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"score": 1}',
        b'{"score": 1, "parts": {}, "extra": {}, "logged": []}',
        b'{"score": 1.0, "parts": {"part": NaN}, "extra": {}, "logged": []}',
        b'{"score": 1.0, "parts": {"part": "1.0"}, "extra": {}, "logged": []}',
        b'{"score": 1.0, "parts": {}, "extra": {"text": 1.0}, "logged": []}',
        b'{"score": NaN, "parts": {}, "extra": {}, "logged": []}',
        b'{"score": 1.0, "parts": {}, "extra": {}, "logged": [1]}',
        b'{"score": 1.0, "parts": {}, "extra": {}, "logged": {}}',
        b'{"score": 1.0, "parts": [], "extra": {}, "logged": []}',
        b'{"parts": {}, "extra": {}, "logged": []}',
    ],
)
def test_data_that_is_no_result_is_a_problem_and_not_an_exception(data: bytes) -> None:
    result = decode(data)
    assert result.score is None
    assert "which is not a result" in result.problem


def test_a_result_survives_its_way() -> None:
    for result in (
        Result(0.5),
        Result(1.0, {"score": 1.0, "\ud800 odd": -0.25}),
        Result(None, {"part": 1.0}, {"said": "\ud800"}),
        Result(1.0, {"part": 1.0, "seen": 2.0}, logged=frozenset({"seen"})),
        Result(problem="p\n", limit="time"),
    ):
        assert decode(encode(result)) == result


# -- garbage is the item's failure ------------------------------------------------------------------------------------


NEXT_ITEM = make_frame(3, b"1.0")  # the item after the one that writes, where the grader has no items before
GARBAGE = (NEXT_ITEM, b"\n", b"garbage", b"garbage\n" * 3, b"\0" * 100_000, b"begin\n", os.urandom(1000))


def test_garbage_on_every_descriptor_is_that_items_failure(grader: Grader) -> None:
    for data in GARBAGE:
        grades = grader.grade(["ok", "write", "ok", "ok"], [{"data": data}] * 4)
        assert [grade.score for grade in grades] == [1.0, -1.0, 1.0, 1.0], data
        assert grades[1].error is not None
        assert "to the channel of its results" in grades[1].error, data


def test_a_reward_that_answers_by_itself_harms_no_other_item(grader: Grader) -> None:
    grades = grader.grade(["write", *["ok"] * 8], [{"data": make_frame(1, b"0.25")}] * 9)
    assert [grade.score for grade in grades] == [0.25, *[1.0] * 8]


def test_garbage_does_not_move_a_deadline(impatient: Grader) -> None:
    grades = impatient.grade(["write and spin", "ok"], [{"data": b"garbage"}, {}])
    assert [grade.timed_out for grade in grades] == [True, False]


def test_a_result_without_an_end_is_cut() -> None:
    head = HEADER.pack(1, 1 << 60)

    def flood(completion: str, row: Row) -> float:
        with socket.socket(fileno=max(fd for fd in map(int, os.listdir("/proc/self/fd")) if is_socket(fd))) as channel:
            channel.sendall(head)
            while True:
                channel.sendall(b"x" * 65536)

    with Grader(RewardConfig(on_error="score", time_limit_s=LONG_S), reward=flood) as flooded:
        assert "over 1,048,576 bytes" in str(flooded.grade([""], [{}])[0].error)


def is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("close everything", "ended its process (exit code 70)"),
        pytest.param("stop", f"ran over {LIMIT_S:g} s", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_that_cannot_answer_is_that_items_failure(impatient: Grader, word: str, cause: str) -> None:
    grades = grade_undisturbed(lambda: impatient.grade(["ok", word, "ok"], [{}] * 3), late=[1])
    assert [grade.error for grade in grades] == [None, cause, None]


def test_a_dispatcher_that_its_reward_has_stopped_goes_on(grader: Grader) -> None:
    graded = [grader.submit(word, {}) for word in ("ok", "stop the dispatcher", "ok")]
    assert [future.result(timeout=LONG_S).score for future in graded] == [1.0, 1.0, 1.0]


# -- what a reward starts ends with it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", [pytest.param("daemonize and spin", marks=pytest.mark.exhaustive), "daemonize and exit"]
)
def test_a_daemon_ends_with_its_grading_process(impatient: Grader, word: str, tag: str) -> None:
    failed, after = grade_undisturbed(lambda: impatient.grade([word, "ok"], [{"tag": tag}, {}]), late=[0])
    assert (failed.score, after.score) == (-1.0, 1.0)
    assert wait_until(lambda: not alive_with(tag))
    assert wait_until(lambda: "Z" not in family_of(os.getpid()).values())


def test_a_daemon_of_one_process_does_not_end_with_another(tag: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    with Grader(RewardConfig(time_limit_s=LONG_S, on_error="score", processes=2), reward=misbehave) as grader:
        assert grader.grade(["daemonize"], [{"tag": tag}])[0].score == 1.0
        assert wait_until(lambda: alive_with(tag))
        first = grader.submit("wait for a file", {"path": str(go_on)})  # in the daemon's process, the only one so far
        assert grader.submit("exit", {}).result().error is not None
        assert not first.done()
        assert alive_with(tag), "the daemon ended with the other process"
        go_on.touch()
        assert first.result().score == 1.0


def test_a_daemon_ends_when_the_grader_closes(grader: Grader, tag: str) -> None:
    assert grader.grade(["daemonize"], [{"tag": tag}])[0].score == 1.0
    assert wait_until(lambda: alive_with(tag)), "it may live as long as its grading process"
    grader.close()
    assert not alive_with(tag)


@pytest.mark.exhaustive
def test_a_process_that_leaves_many_behind_is_replaced(tag: str) -> None:
    with Grader(RewardConfig(processes=1), reward=misbehave) as grader:
        for _ in range(3):
            assert all(grade.score == 1.0 for grade in grader.grade(["leave a child"] * 66, [{"tag": tag}] * 66))
        assert wait_until(lambda: len(alive_with(tag)) <= 2 * 66)


CONTROLLER = """
import sys
from podium.rewards import Grader, RewardConfig
from tests.unit.rewards.deeds import daemonize

def reward(text, row):
    daemonize(row["tag"])
    if text == "spin":
        open(row["path"], "w").close()
        while True:
            pass
    return 1.0

with Grader(RewardConfig(time_limit_s=1000, processes=2), reward=reward) as grader:
    row = {"tag": sys.argv[1], "path": sys.argv[2]}
    grader.grade(["once", "spin"], [row, row])
"""


@pytest.mark.parametrize("victim", ["controller", pytest.param("dispatcher", marks=pytest.mark.exhaustive)])
def test_a_daemon_ends_when_the_controller_or_the_dispatcher_is_killed(victim: str, tag: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, tag, str(tmp_path / "began")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as controller:
        try:
            assert wait_until((tmp_path / "began").exists)
            daemons = [pid for pid in alive_with(tag) if pid != controller.pid]
            assert wait_until(lambda: len(alive_with(tag)) == 3), daemons
            family = family_of(controller.pid)
            (dispatcher,) = [pid for pid in family if parent_of(pid) == controller.pid]
            os.kill(controller.pid if victim == "controller" else dispatcher, signal.SIGKILL)
            _, said = controller.communicate(timeout=LONG_S)
        finally:
            controller.kill()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
    assert not alive_with(tag)
    if victim == "dispatcher":
        assert "RewardError: the process that grades with the reward __main__:reward ended (signal SIGKILL)" in said


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -- limits -----------------------------------------------------------------------------------------------------------


def test_an_item_has_all_of_its_time(impatient: Grader) -> None:
    impatient.grade(["ok"], [{}])
    started = time.monotonic()
    assert impatient.grade(["stop"], [{}])[0].timed_out
    assert time.monotonic() - started >= LIMIT_S


def test_memory_above_the_limit_is_that_items_failure_and_the_run_goes_on() -> None:
    with Grader(RewardConfig(memory_gib=0.25, failure_score=-1.0, processes=1), reward=misbehave) as grader:
        sizes = [100 << 20, 300 << 20, 100 << 20]
        grades = grader.grade(["allocate"] * 3, [{"bytes": size} for size in sizes])
    assert grades[1] == Grade(-1.0, error="ran over 0.25 GiB of memory (reward.memory_gib)")
    assert [grade.score for grade in grades] == [1.0, -1.0, 1.0]


def test_what_earlier_items_leaked_is_not_held_against_a_later_one() -> None:
    with Grader(RewardConfig(memory_gib=0.25, processes=1), reward=misbehave) as grader:
        grades = grader.grade(["leak"] * 20, [{"bytes": 50 << 20}] * 20)
    assert [grade.error for grade in grades] == [None] * 20


def test_without_a_limit_a_memory_error_is_an_error_of_the_reward() -> None:
    with (
        Grader(RewardConfig(memory_gib=None), reward=misbehave) as grader,
        pytest.raises(RewardError, match="raised MemoryError"),
    ):
        grader.grade(["allocate"], [{"bytes": 1 << 60}])


# -- the environment --------------------------------------------------------------------------------------------------

SECRETS = [
    *(
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "GITHUB_TOKEN",
        "MY_SECRET",
        "OPENAI_API_KEY",
        "PGPASSWORD",
    ),
    *(
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "DB_PASS",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SSH_AUTH_SOCK",
        "my_token",
    ),
]
PLAIN = [
    "HOME",
    "PATH",
    "PWD",
    "TOKENIZERS_PARALLELISM",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "KEYBOARD",
    "OMP_NUM_THREADS",
]


def test_secrets_of_the_environment_reach_a_reward_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    with Grader(RewardConfig(env=("HF_TOKEN",)), reward=has_variable) as grader:
        names = [*SECRETS, *PLAIN]
        seen = [name for name, grade in zip(names, grader.grade(names, [{}] * len(names)), strict=True) if grade.score]
    assert seen == ["HF_TOKEN", *PLAIN]


def test_a_reward_that_misses_a_secret_is_told_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "1")

    def judge(completion: str, row: Row) -> float:
        return len(os.environ["JUDGE_API_KEY"])

    with (
        Grader(reward=judge) as grader,
        pytest.raises(RewardError, match="JUDGE_API_KEY does not reach rewards unless"),
    ):
        grader.grade([""], [{}])


def test_a_module_that_misses_a_secret_is_told_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "1")
    (tmp_path / "judges.py").write_text("import os\nKEY = os.environ['JUDGE_API_KEY']\n")
    with (
        Grader(RewardConfig(name=f"{tmp_path}/judges.py:judge")) as grader,
        pytest.raises(ConfigError, match=r"judges\.py:2: KeyError: .*JUDGE_API_KEY does not reach rewards unless"),
    ):
        grader.start()


def test_a_reward_that_returns_in_a_process_that_it_forked_is_graded_once(grader: Grader) -> None:
    work = ["return from a fork", "ok"] * 3
    assert [(grade.score, grade.error) for grade in grader.grade(work, [{}] * 6)] == [(1.0, None)] * 6
