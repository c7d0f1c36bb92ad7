"""Graders with real processes: what they return, what they survive, and that nothing is left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from io import FileIO
from pathlib import Path

import pytest

from podium.errors import ConfigError, RewardError
from podium.rewards import Grade, Grader, RewardConfig, dispatcher_client
from podium.rewards.call_forms import Item
from podium.rewards.reward_functions import RewardFunctions, call_rewards
from podium.telemetry import Event, Note, subscribe
from tests.unit.rewards.deeds import Row, alive_with, family_of, misbehave, own_pid, returns
from tests.waits import LONG_S, grade_undisturbed, wait_until

LIMIT_S = 2.0  # where an item is to pass it; the other items of such a grader take no time


@pytest.fixture
def tolerant() -> Iterator[Grader]:
    config = RewardConfig(time_limit_s=LONG_S, on_error="score", failure_score=-1.0, processes=2)
    with Grader(config, reward=misbehave) as grader:
        yield grader


@pytest.fixture
def strict() -> Iterator[Grader]:
    with Grader(RewardConfig(time_limit_s=LONG_S, processes=2), reward=misbehave) as grader:
        yield grader


# -- what comes back -------------------------------------------------------------------------------------------------


def test_grades_are_in_order_and_processes_are_reused() -> None:
    with Grader(RewardConfig(name="gsm8k", processes=2)) as grader:
        for _ in range(3):
            numbers = list(range(300))
            grades = grader.grade([str(n) for n in numbers], [{"answer": f"#### {n // 2 * 2}"} for n in numbers])
            assert [grade.score for grade in grades] == [float(n % 2 == 0) for n in numbers]
            assert [grade.correct for grade in grades] == [n % 2 == 0 for n in numbers]
        assert grader.grade([], []) == []
    with Grader(RewardConfig(processes=1), reward=own_pid) as grader:
        pids = {grade.score for _ in range(3) for grade in grader.grade([""] * 50, [{}] * 50)}
    assert len(pids) == 1


def test_parts_and_the_threshold_of_correctness() -> None:
    values = [True, 0.5, 1, Fraction(1, 2), {"score": 0.75, "format": True}, {"score": 0.25}]
    with Grader(RewardConfig(correct_at=0.5), reward=returns) as grader:
        grades = grader.grade([""] * len(values), [{"value": value} for value in values])
    assert [grade.score for grade in grades] == [1.0, 0.5, 1.0, 0.5, 0.75, 0.25]
    assert [grade.correct for grade in grades] == [True, True, True, True, True, False]
    assert [dict(grade.parts) for grade in grades[-2:]] == [{"format": 1.0}, {}]
    reward = RewardConfig()
    assert [reward.is_correct(score) for score in (0.0, 1.0, 0.5, 1.1, -1.0)] == [False, True, None, None, None]


def test_numpy_and_torch_scalars_are_numbers() -> None:
    import numpy as np
    import torch  # here, because grading processes import this module, and it takes seconds

    values = [np.float32(0.5), np.bool_(True), np.array(2.0), torch.tensor(0.25)]
    functions = RewardFunctions([returns])
    results = [call_rewards(functions, Item("", {"value": value})) for value in values]
    assert [result.score for result in results] == [0.5, 1.0, 2.0, 0.25]
    assert call_rewards(functions, Item("", {"value": torch.ones(2)})).problem == "returned tensor([1., 1.]) (Tensor)"


NO_SCORES: tuple[tuple[object, str], ...] = (
    (math.nan, r"returned nan \(float\)"),
    (-math.inf, r"returned -inf \(float\)"),
    (1e39, r"returned 1e\+39 \(float\)"),
    ("1.0", r"returned '1.0' \(str\)"),
    ([1.0], r"returned \[1.0\] \(list\)"),
    ({"format": 1.0}, "returned a mapping without \"score\" \\(it has 'format'\\)"),
    ({}, r"returned a mapping without \"score\" \(it has nothing\)"),
    ({"score": 1.0, "format": math.nan}, r"returned nan \(float\) as part 'format'"),
    (10**400, r"returned 1000"),
)


def test_what_is_no_score_is_an_error_with_reward_item_completion_and_remedy() -> None:
    with Grader(reward=returns) as grader:
        for value, message in NO_SCORES:
            with pytest.raises(RewardError, match=message) as caught:
                grader.grade(["fine", "words " * 40], [{"value": 1.0}, {"value": value}])
            text = str(caught.value)
            assert "item 1" in text
            assert "returns" in text, "the reward must be named"
            assert repr(("words " * 40)[:80]) in text
            assert "reward.on_error" in text


def test_a_raising_reward_shows_its_own_traceback(strict: Grader) -> None:
    with pytest.raises(RewardError, match="raised ValueError: no such unit: parsec") as caught:
        strict.grade(["ok", "raise"], [{}, {}])
    assert "in misbehave" in str(caught.value)
    assert "child.py" not in str(caught.value)
    assert strict.grade(["ok"], [{}]) == [Grade(1.0, {}, True)], "the grader must be usable after an error"


@pytest.mark.parametrize(("word", "cause"), [("segfault", "signal SIGSEGV"), ("exit", "exit code 3")])
def test_a_reward_that_ends_its_process_raises(strict: Grader, word: str, cause: str) -> None:
    with pytest.raises(RewardError, match=f"item 2, completion '{word}': .* ended its process \\({cause}\\)"):
        strict.grade(["ok", "ok", word, "ok"], [{}] * 4)


# -- what it survives ------------------------------------------------------------------------------------------------


def test_one_bad_item_harms_no_other(tolerant: Grader) -> None:
    words = ["ok", "raise", "ok", "segfault", "ok", "exit", "sys.exit", "ok"] * 5
    grades = tolerant.grade(words, [{}] * len(words))
    assert [grade.score for grade in grades] == [1.0 if word == "ok" else -1.0 for word in words]
    assert not any(grade.correct or grade.timed_out for grade in grades if grade.score < 0)
    errors = {word: grade.error for word, grade in zip(words, grades, strict=True)}
    assert errors == {
        "ok": None,
        "raise": "raised ValueError: no such unit: parsec",
        "segfault": "ended its process (signal SIGSEGV)",
        "exit": "ended its process (exit code 3)",
        "sys.exit": "raised SystemExit: 4",
    }


@pytest.mark.parametrize("word", [pytest.param("spin", marks=pytest.mark.exhaustive), "spin in C"])
def test_what_runs_over_its_limit_is_killed_and_the_rest_goes_on(word: str) -> None:
    words = ["ok"] * 40
    words[7] = words[30] = word
    heard: list[Event] = []
    with Grader(RewardConfig(time_limit_s=LIMIT_S, processes=2), reward=misbehave) as grader:
        grader.start()

        def grade() -> list[Grade]:
            heard.clear()
            return grader.grade(words, [{}] * len(words))

        unsubscribe = subscribe(heard.append)
        grades = grade_undisturbed(grade, late=[7, 30])
        unsubscribe()
    assert [index for index, grade in enumerate(grades) if grade.timed_out] == [7, 30]
    assert [event.text for event in heard if isinstance(event, Note)] == [
        f"the reward {grader.name} failed on 2 of 40 completions, which got 0; the first: ran over {LIMIT_S:g} s"
    ]
    assert grades[7] == Grade(0.0, {}, False, f"ran over {LIMIT_S:g} s", True)
    assert sum(grade.score for grade in grades) == 38


def test_the_limit_is_for_an_item_and_not_for_a_batch() -> None:
    with Grader(RewardConfig(time_limit_s=LIMIT_S, processes=1), reward=misbehave) as grader:
        grades = grade_undisturbed(lambda: grader.grade(["slow"] * 5, [{}] * 5))  # 2.5 s in all
    assert not any(grade.timed_out for grade in grades)


def test_results_from_before_a_kill_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "graded"

    def count(completion: str, row: Row) -> float:
        with log.open("a") as file:
            file.write(completion + "\n")
        if completion == "19":
            time.sleep(600)
        return 1.0

    with Grader(RewardConfig(time_limit_s=LIMIT_S, processes=1), reward=count) as grader:

        def grade() -> list[Grade]:
            log.write_text("")
            return grader.grade([str(n) for n in range(40)], [{}] * 40)

        grades = grade_undisturbed(grade, late=[19])
    assert [index for index, grade in enumerate(grades) if grade.timed_out] == [19]
    assert sorted(map(int, log.read_text().split())) == list(range(40)), "each item must be graded exactly once"


def test_killed_and_dead_processes_leave_no_child_of_theirs() -> None:
    tag = f"tag-{os.getpid()}-{time.monotonic_ns()}"
    config = RewardConfig(time_limit_s=LIMIT_S, on_error="score", failure_score=-1.0, processes=2)
    with Grader(config, reward=misbehave) as grader:
        words = ["grandchild", "orphan", "ok"]
        grades = grade_undisturbed(lambda: grader.grade(words, [{"tag": tag}] * 3), late=[0])
        assert [grade.score for grade in grades] == [-1.0, -1.0, 1.0]
        assert wait_until(lambda: not alive_with(tag))
        assert wait_until(lambda: "Z" not in family_of(os.getpid()).values())


def test_several_threads_may_use_one_grader(tolerant: Grader) -> None:
    results: dict[int, list[float]] = {}

    def work(worker: int) -> None:
        for _ in range(5):
            words = ["ok", "raise"] * 10 + ["ok"] * worker
            results[worker] = [grade.score for grade in tolerant.grade(words, [{}] * len(words))]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {worker: [1.0, -1.0] * 10 + [1.0] * worker for worker in range(4)}


def dispatcher() -> int:
    """The process between this one and its grading processes."""
    mine = set(alive_with("podium.rewards.grading_dispatcher")) & set(
        family_of(os.getpid())
    )  # forks share its command line
    (pid,) = [pid for pid in mine if family_of(pid)]
    return pid


def test_a_dispatcher_that_is_killed_between_calls_is_replaced(strict: Grader) -> None:
    strict.grade(["ok"], [{}])
    first = dispatcher()
    children = family_of(first)
    os.kill(first, signal.SIGKILL)
    assert children
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children)), "they must die with it"
    assert strict.grade(["ok"], [{}])[0].score == 1.0
    assert dispatcher() != first


def test_a_dispatcher_that_is_killed_at_work_is_named_and_the_next_call_starts_anew(
    strict: Grader, tmp_path: Path
) -> None:
    strict.grade(["ok"], [{}])
    victim, spins = dispatcher(), tmp_path / "spins"

    def kill_at_work() -> None:
        wait_until(spins.exists)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_at_work)
    killer.start()
    with pytest.raises(RewardError, match=r"ended \(signal SIGKILL\).*reward\.processes"):
        strict.grade(["touch and spin"], [{"path": str(spins)}])
    killer.join()
    assert strict.grade(["ok"], [{}])[0].score == 1.0


# -- one item at a time ----------------------------------------------------------------------------------------------


def test_a_future_comes_at_once_and_its_grade_when_it_is_there(tmp_path: Path) -> None:
    def wait_for_file(completion: str, row: Row) -> float:
        while not (tmp_path / completion).exists():
            time.sleep(0.005)
        return float(completion)

    with Grader(RewardConfig(processes=2, time_limit_s=LONG_S), reward=wait_for_file) as grader:
        first, second, third = (grader.submit(name, {}) for name in "123")
        (tmp_path / "2").touch()
        assert second.result(timeout=LONG_S).score == 2.0, "items end in any order"
        assert not first.done()
        (tmp_path / "1").touch()
        (tmp_path / "3").touch()
        assert [grade.score for grade in grader.gather([first, second, third])] == [1.0, 2.0, 3.0]


def test_an_error_belongs_to_its_own_future(strict: Grader) -> None:
    bad, good = strict.submit("raise", {}), strict.submit("ok", {})
    assert good.result(timeout=LONG_S) == Grade(1.0, {}, True)
    with pytest.raises(RewardError, match=r"^completion 'raise': .* raised ValueError: no such unit"):
        bad.result(timeout=LONG_S)


def test_a_cancelled_item_frees_its_process(tmp_path: Path) -> None:
    def spin_or_not(completion: str, row: Row) -> float:
        while completion == "spin":
            (tmp_path / "began").touch()
        return 1.0

    with Grader(RewardConfig(processes=1, time_limit_s=1000), reward=spin_or_not) as grader:
        spinning, waiting = grader.submit("spin", {}), grader.submit("spin", {})
        assert wait_until((tmp_path / "began").exists)
        assert spinning.cancel()
        assert waiting.cancel()
        assert grader.submit("ok", {}).result(timeout=LONG_S).score == 1.0
        dropped = [grader.submit("spin", {}) for _ in range(3)]
        grader.drop()
        assert all(future.cancelled() for future in dropped)
        assert grader.submit("ok", {}).result(timeout=LONG_S).score == 1.0


def test_an_error_in_a_batch_ends_the_work_on_its_other_items() -> None:
    with Grader(RewardConfig(time_limit_s=1000, processes=1), reward=misbehave) as grader:
        with pytest.raises(RewardError, match="no such unit"):
            grader.grade(["raise", *["spin"] * 999], [{}] * 1000)
        assert grader.submit("ok", {}).result(timeout=LONG_S).score == 1.0


def test_closing_settles_what_waits(strict: Grader) -> None:
    future = strict.submit("ok", {})
    spinning = strict.submit("spin", {})
    future.result(timeout=LONG_S)
    strict.close()
    with pytest.raises(RewardError, match="was closed before this was graded"):
        spinning.result(timeout=LONG_S)


# -- starting and ending ---------------------------------------------------------------------------------------------


def test_grading_processes_are_free_of_torch(tmp_path: Path) -> None:
    assert __import__("torch") is sys.modules["torch"]
    (tmp_path / "look.py").write_text("import sys\ndef score(text, row): return float('torch' in sys.modules)\n")
    with Grader(RewardConfig(name=f"{tmp_path}/look.py:score")) as grader:
        assert grader.grade([""], [{}])[0].score == 0.0


def test_a_reward_in_a_file_and_one_from_a_closure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text("from helpers import double\ndef score(text, row): return double(row['x'])\n")
    (tmp_path / "helpers.py").write_text("def double(x): return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    with Grader(RewardConfig(name="rewards.py:score")) as grader:
        assert grader.grade([""], [{"x": 2}])[0].score == 4.0
    monkeypatch.syspath_prepend(str(tmp_path))
    with Grader(RewardConfig(name="rewards:score")) as grader:
        assert grader.grade([""], [{"x": 3}])[0].score == 6.0
    bonus = 0.5
    with Grader(reward=lambda text, row: len(text) + bonus) as grader:
        assert grader.grade(["ab"], [{}])[0].score == 2.5


def test_mistakes_show_at_start(tmp_path: Path) -> None:
    with Grader(RewardConfig(name="gsm8")) as grader, pytest.raises(ConfigError, match="did you mean gsm8k"):
        grader.start()
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')\n")
    with (
        Grader(RewardConfig(name=f"{tmp_path}/broken.py:score")) as grader,
        pytest.raises(ConfigError, match=r"broken\.py:1: RuntimeError: no licence"),
    ):
        grader.start()
    lock = threading.Lock()
    with Grader(reward=lambda *_: float(lock.locked())) as grader, pytest.raises(RewardError, match="cannot be sent"):
        grader.start()
    with Grader(reward=misbehave) as grader, pytest.raises(RewardError, match="item 0, completion 'ok' cannot be sent"):
        grader.grade(["ok"], [{"lock": lock}])
    with Grader(reward=misbehave) as grader, pytest.raises(ConfigError, match="2 completions and 1 row"):
        grader.grade(["ok", "ok"], [{}])
    with pytest.raises(ConfigError, match="closed"):
        grader.grade(["ok"], [{}])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", " "),
        ("time_limit_s", 0.0),
        ("time_limit_s", math.inf),
        ("processes", -1),
        ("failure_score", math.nan),
        ("on_error", "ignore"),
        ("correct_at", math.nan),
        ("memory_gib", 0.0),
        ("env", "HF_TOKEN"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"reward.{setting} = "):
        RewardConfig(**{setting: value})  # pyright: ignore[reportArgumentType]


def test_the_rewards_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "reward.log"
    with Grader(RewardConfig(on_error="score"), reward=misbehave, log_path=log) as grader:
        grader.grade(["print", "segfault"], [{}] * 2)
    text = log.read_text()
    assert "Segmentation fault" in text, "the log must say where a reward crashed"
    with Grader(reward=misbehave, log_path=log) as grader:
        grader.grade(["print"], [{}])
    assert log.read_text().startswith(text), "a log is appended to"
    assert "words of the reward\n" in log.read_text()


def test_closing_ends_every_process_even_a_busy_one(tmp_path: Path) -> None:
    before = set(family_of(os.getpid()))
    grader = Grader(RewardConfig(time_limit_s=LONG_S, processes=2), reward=misbehave)
    grader.grade(["ok"] * 4, [{}] * 4)
    mine = set(family_of(os.getpid())) - before
    assert len(mine) >= 2, "a dispatcher and at least one child"
    errors: list[BaseException] = []

    def interrupt_soon() -> None:
        main = threading.main_thread().ident or 0
        wait_until((tmp_path / "spins").exists)
        # Ctrl-C closes the grader where the main thread waits for grades.
        wait_until(lambda: sys._current_frames()[main].f_code.co_filename == threading.__file__)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt_soon)
    thread.start()
    try:
        grader.grade(["touch and spin"], [{"path": str(tmp_path / "spins")}])
    except KeyboardInterrupt as error:
        errors.append(error)
    thread.join()
    assert errors, "Ctrl-C must reach the caller"
    assert not mine & set(family_of(os.getpid()))
    with pytest.raises(ConfigError, match="closed"):
        grader.grade(["ok"], [{}])


CONTROLLER = """
import sys, time
from podium.rewards import Grader, RewardConfig

def spin(text, row):
    open(row["path"], "w").close()
    while True:
        pass

grader = Grader(RewardConfig(time_limit_s=1000, processes=2), reward=spin)
grader.grade(["", ""], [{"path": path} for path in sys.argv[1:3]])
"""


@pytest.mark.exhaustive
def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    marks = [tmp_path / "first", tmp_path / "second"]
    # A new interpreter: a warm process has a server of its own among its children.
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, *map(str, marks)])
    try:
        assert wait_until(lambda: all(mark.exists() for mark in marks))
        family = set(family_of(controller.pid))
        assert len(family) == 3, "a dispatcher and two children"
    finally:
        controller.kill()
        controller.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_a_forgotten_grader_ends_with_its_script() -> None:
    script = "from podium.rewards import Grader\ng = Grader()\nprint(g.grade(['1'], [{'answer': '1'}])[0].score)\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=200, check=True
    )
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_what_a_reward_prints_while_its_log_is_shortened_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "reward.log"
    path.write_text("".join(f"{number:04}\n" for number in range(100)))

    class Printing(FileIO):
        """Others append at each of the first three reads."""

        count = 0

        def readall(self) -> bytes:
            part = super().readall()
            if self.count < 3:
                self.count += 1
                with path.open("a") as log:
                    log.write(f"late {self.count}\n")
            return part

    with Printing(path, "r+") as file:
        dispatcher_client._keep_end(file, 52)
    first, *lines = path.read_text().splitlines()
    assert first.startswith("(what the reward had printed")
    assert lines == [*(f"{number:04}" for number in range(90, 100)), "late 1", "late 2", "late 3"]


def test_the_log_of_a_reward_that_prints_much_keeps_the_newest_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.rewards.dispatcher_client.MOST_LOG_BYTES", 1 << 16)
    log, notes = tmp_path / "reward.log", list[str]()

    def speak(completion: str) -> float:
        print(completion, "x" * 4000)  # noqa: T201 - this is what is tested
        return 1.0

    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        with Grader(RewardConfig(processes=1), reward=speak, log_path=log) as grader:
            for part in range(4):
                texts = [f"number {part * 50 + n}" for n in range(50)]
                assert len(grader.grade(texts, [{}] * 50)) == 50
            assert wait_until(lambda: log.stat().st_size <= 1 << 16)
            assert grader.grade(["the end"], [{}])[0].score == 1.0
            assert wait_until(lambda: "the end" in log.read_text())
    finally:
        unsubscribe()
    text = log.read_text()
    assert text.startswith("(what the reward had printed before was dropped)\n")
    assert "number 199 " in text and "number 0 " not in text
    assert "\0" not in text
    assert len([note for note in notes if "print less in the reward" in note]) == 1
