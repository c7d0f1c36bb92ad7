"""Failures during calls, with real processes: who failed, why, and what is usable afterwards.

Siblings are busy for ten minutes, twice the time limit of a test: what waits for them fails. How soon a failure is told
is measured in ``bench``.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import podium
from podium import Cluster, Handle, telemetry
from podium.backends.local.backend import LocalBackend
from podium.errors import CallCancelled, ConfigError, DeadlineExceeded, EndpointError, PodiumError, WorkerDied
from podium.runtime import WorkerGroup, colocate
from podium.runtime.calls import process_calls
from tests.integration.fault_workers import Faulty, Slow
from tests.integration.processes import alive, all_gone, parent_of, wait_for

LIMIT_S = 60.0


@pytest.fixture
def faulty(local: Cluster) -> Iterator[Handle[Faulty]]:
    """Three ranks with a process group."""
    pool = local.pool([3])
    worker = local.start(Faulty.bind(), pool, name="faulty")
    yield worker
    worker.group.processes.close(timeout_s=0.0)  # many are busy for minutes by now
    worker.group.close()
    local.release(pool)


@pytest.mark.everyday("0-sleep", "2-collective")
@pytest.mark.parametrize(
    ("rank", "siblings"),
    list(itertools.product((0, 2), ("sleep", "collective"))),
)
def test_one_rank_raises_while_the_others_are_busy_for_minutes(
    faulty: Handle[Faulty], rank: int, siblings: str
) -> None:
    with pytest.raises(EndpointError, match=r"faulty\.fail_on raised LookupError.*the first cause") as caught:
        faulty.fail_on(rank, "raise", siblings, 0.2)
    assert (caught.value.rank, caught.value.method) == (rank, "fail_on")
    assert isinstance(caught.value.__cause__, LookupError)


def test_after_that_the_group_says_it_is_broken_until_it_is_restarted(faulty: Handle[Faulty]) -> None:
    with pytest.raises(EndpointError):
        faulty.fail_on(1, "raise", "collective", 0.1)
    with pytest.raises(EndpointError, match=r"faulty is broken: rank 1 raised LookupError in faulty\.fail_on.*restart"):
        faulty.gather_ranks()  # at once: it must not meet its siblings in the collective they are still in
    faulty.group.restart()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_siblings_freed_from_a_collective_are_secondary(faulty: Handle[Faulty]) -> None:
    """Rank 0 fails late and is the cause, although its siblings fail in their collective because of it."""
    for _ in range(2):
        with pytest.raises(EndpointError) as caught:
            faulty.fail_on(0, "raise", "collective", 0.2)
        assert (caught.value.rank, "the first cause" in str(caught.value)) == (0, True)
        faulty.group.restart()


@pytest.fixture
def third_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that appears when the siblings of a failed rank have been looked at three times."""
    looked = tmp_path / "looked"
    find = process_calls.find_waiting_siblings

    def find_and_count(failed: int, ask: Callable[[], Any], *others: Any) -> list[int]:
        looks = itertools.count(1)

        def ask_and_count() -> Any:
            states = ask()
            if next(looks) == 3:
                looked.touch()
            return states

        return find(failed, ask_and_count, *others)

    monkeypatch.setattr(process_calls, "find_waiting_siblings", find_and_count)
    return looked


@pytest.mark.parametrize("then", ["raise", "return"])
def test_a_late_end_of_the_siblings_breaks_nothing(faulty: Handle[Faulty], third_look: Path, then: str) -> None:
    with pytest.raises(EndpointError, match="the same on all ranks"):
        faulty.raise_one_after_the_other(str(third_look), then)
    assert not third_look.exists(), "the error was raised while the siblings were at work"
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3  # it waits for the siblings, and meets nobody
    assert third_look.exists()


@pytest.mark.parametrize("then", ["gather", "receive"])
def test_siblings_that_come_to_wait_for_a_failed_rank_are_freed(
    faulty: Handle[Faulty], third_look: Path, then: str
) -> None:
    with pytest.raises(EndpointError, match="the same on all ranks"):
        faulty.raise_one_after_the_other(str(third_look), then)
    with pytest.raises(EndpointError, match=r"is broken: rank 0 raised KeyError.*\d.* waited for it in a collective"):
        faulty.gather_ranks()
    faulty.group.restart()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_a_call_behind_a_failed_one_keeps_its_deadline(faulty: Handle[Faulty], tmp_path: Path) -> None:
    signal = tmp_path / "signal"
    with pytest.raises(EndpointError, match="the same on all ranks"):
        faulty.raise_one_after_the_other(str(signal), "return")
    with pytest.raises(
        DeadlineExceeded, match=r"before it was sent: ranks \[1, 2\] of faulty still run faulty\.raise_one"
    ):
        faulty.gather_ranks.within(timeout_s=0.5)()
    signal.touch()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_all_ranks_raise_alike_and_the_group_stays_usable(faulty: Handle[Faulty]) -> None:
    for _ in range(3):
        with pytest.raises(EndpointError, match="alike on all ranks"):
            faulty.raise_everywhere()
        assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_an_async_endpoint_raises_while_its_siblings_wait(faulty: Handle[Faulty]) -> None:
    with pytest.raises(EndpointError, match="the first cause"):
        faulty.fail_on_async(1, "raise")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "signal SIGKILL"),
        ("segfault", "signal SIGSEGV"),
        ("os._exit", "exit code 3"),
    ],
)
def test_a_process_that_ends_in_a_call_is_named_with_cause_and_last_words(
    faulty: Handle[Faulty], how: str, cause: str
) -> None:
    with pytest.raises(WorkerDied) as caught:
        faulty.fail_on(1, how, "collective" if how == "kill" else "sleep", 0.1)
    error = caught.value
    assert (error.rank, error.cause, error.role, error.node) == (1, cause, "faulty", "localhost")
    assert f"rank 1 is about to {how}" in error.last_words
    assert f"rank 1 is about to {how}" in str(error)
    if how == "segfault":
        assert any("string_at" in line for line in error.last_words), "the stack of the crash is in its last words"


KINDS = {"sys.exit": "SystemExit", "interrupt": "KeyboardInterrupt", "raise": "LookupError"}


@pytest.mark.parametrize("how", KINDS)
def test_leaving_python_politely_is_an_endpoint_error_and_the_process_lives(faulty: Handle[Faulty], how: str) -> None:
    pids = faulty.group.pids
    with pytest.raises(EndpointError, match=KINDS[how]):
        faulty.fail_on(0, how, "return")
    assert faulty.rank() == [0, 1, 2]
    assert faulty.group.pids == pids


def test_killed_from_outside_during_a_call(faulty: Handle[Faulty]) -> None:
    call = faulty.fail_on.submit(99, "-", "sleep")
    time.sleep(0.1)
    os.kill(faulty.group.pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 2 of faulty on localhost ended while this call waited"):
        call.result()


def test_killed_before_a_call(faulty: Handle[Faulty]) -> None:
    os.kill(faulty.group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 1 of faulty.*signal SIGKILL") as caught:
        faulty.rank()
    assert caught.value.rank == 1
    with pytest.raises(WorkerDied, match=r"rank 1 of faulty.*restart"):
        faulty.rank()
    faulty.group.restart()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_killed_after_a_call_its_results_stay(faulty: Handle[Faulty]) -> None:
    value = torch.arange(500_000.0)
    call = faulty.echo.submit(value)
    unread = faulty.echo.submit(value + 1)
    got = call.result()
    assert wait_for(unread.done, LIMIT_S)
    for pid in faulty.group.pids:
        os.kill(pid, signal.SIGKILL)
    assert not all_gone(faulty.group.pids, LIMIT_S)
    time.sleep(0.1)
    assert torch.equal(got, value), "a tensor outlives the process that made it"
    assert torch.equal(unread.result(), value + 1), "a result that arrived can be read after the death"
    faulty.group.restart()
    assert torch.equal(got, value), "and the restart"


class KillsWhilePacked:
    """An argument that kills a rank, and waits until that is known, on its way into the message."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(self.group.pids[1], signal.SIGKILL)
        assert wait_for(lambda: bool(self.group.lost), LIMIT_S)
        return str, ("pickled",)


def test_killed_while_the_arguments_of_a_call_are_packed(faulty: Handle[Faulty]) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 of faulty"):
        faulty.echo(KillsWhilePacked(faulty.group))


def test_two_ranks_killed_at_once(faulty: Handle[Faulty]) -> None:
    call = faulty.fail_on.submit(99, "-", "sleep")
    for pid in faulty.group.pids[:2]:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        call.result()
    assert caught.value.rank in (0, 1)
    faulty.group.restart()
    assert faulty.rank() == [0, 1, 2]


def test_a_restart_fails_the_calls_in_the_air(faulty: Handle[Faulty]) -> None:
    running, queued = faulty.fail_on.submit(99, "-", "sleep"), faulty.rank.submit()
    old = faulty.group.pids
    faulty.group.restart()
    for call in (running, queued):
        with pytest.raises(CallCancelled, match="was restarted while this call was in flight"):
            call.result()
    assert not all_gone(old, LIMIT_S)
    assert faulty.rank() == [0, 1, 2]


def pass_deadline(faulty: Handle[Faulty], call: Callable[[float], object], *says: str) -> DeadlineExceeded:
    """Have ``call``, which gets the seconds, pass its deadline when its ranks are where the error says ``says``.

    On a busy machine they may not be there in time. The call gets a longer deadline then.
    """
    for timeout_s in (0.5, 5.0, 50.0):
        with pytest.raises(DeadlineExceeded) as caught:
            call(timeout_s)
        if all(re.search(pattern, str(caught.value)) for pattern in says):
            return caught.value
        faulty.group.restart()
    pytest.fail(f"the last error does not match {says}: {caught.value}")


def test_a_passed_deadline_names_the_stuck_rank_and_restart_ends_it(faulty: Handle[Faulty]) -> None:
    sleep = r"rank 0(.|\n)*time\.sleep\(600\)"
    error = pass_deadline(faulty, lambda seconds: faulty.fail_on.within(timeout_s=seconds)(99, "-", "sleep"), sleep)
    assert error.running == (0, 1, 2)
    faulty.group.restart()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3


def test_a_deadline_in_a_collective_shows_who_is_not_in_it(faulty: Handle[Faulty]) -> None:
    """Rank 1 sleeps where its siblings wait for it: the stacks tell them apart."""
    stacks = r"  rank 0(.|\n)*all_gather(.|\n)*  rank 1(.|\n)*time\.sleep(.|\n)*  rank 2(.|\n)*all_gather"
    error = pass_deadline(faulty, lambda seconds: faulty.sleep_or_gather.within(timeout_s=seconds)(1), stacks)
    ranks = str(error).split("  rank ")
    assert ["all_gather" in rank for rank in ranks[1:4]] == [True, False, True]
    assert ["time.sleep" in rank for rank in ranks[1:4]] == [False, True, False]


def test_a_call_that_only_some_ranks_dropped_breaks_their_group(faulty: Handle[Faulty], tmp_path: Path) -> None:
    """Otherwise rank 1 would meet its siblings of this call in the collective of the next one."""
    busy = faulty.group.function(_wait_for_file, on=1).submit(str(tmp_path / "open"))
    call, said = faulty.gather_ranks.within(timeout_s=1.0).submit(), list[str]()

    def next_call() -> None:
        try:
            faulty.echo(1)
        except EndpointError as error:
            said.append(str(error))

    next_one = threading.Thread(target=next_call)

    def at_once() -> None:
        """Submit the next call before the ranks are told of the deadline. It waits until they have answered."""
        next_one.start()
        next_one.join(0.2)

    call.when_done(at_once)
    with pytest.raises(DeadlineExceeded, match=r"\.gather_ranks passed its deadline"):
        call.result()
    assert wait_for(lambda: bool(said), LIMIT_S)
    next_one.join()
    assert re.search(r"broken: ranks \[1\] dropped faulty\.gather_ranks, which ranks \[0, 2\] ran", said[0])
    (tmp_path / "open").touch()
    busy.wait()


def test_a_call_that_all_ranks_dropped_breaks_nothing(faulty: Handle[Faulty], tmp_path: Path) -> None:
    busy = faulty.group.function(_wait_for_file).submit(str(tmp_path / "open"))
    queued = faulty.gather_ranks.submit()
    assert queued.cancel()
    with pytest.raises(DeadlineExceeded):
        faulty.gather_ranks.within(timeout_s=0.2)()
    after = faulty.gather_ranks.submit()  # which waits until all ranks have heard of the deadline
    (tmp_path / "open").touch()
    assert after.result() == [[0.0, 1.0, 2.0]] * 3
    assert busy.result() == [None] * 3


def _wait_for_file(_: Faulty, path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def test_a_deadline_passes_although_the_interpreter_is_held(faulty: Handle[Faulty]) -> None:
    says = r"holds the interpreter's lock, or the machine is busy, at\n +Faulty\.hold_the_interpreter \(fault_workers"
    pass_deadline(faulty, lambda seconds: faulty.hold_the_interpreter.within(timeout_s=seconds)(600), says)


def test_at_half_its_deadline_a_report_says_where_a_call_is(
    faulty: Handle[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_calls, "REPORT_S", 0.0)
    events: list[telemetry.Event] = []
    unsubscribe = telemetry.subscribe(events.append)
    try:
        stuck = faulty.sleep_or_gather.within(timeout_s=3.0).submit(1)
        queued = faulty.rank.submit()
        with pytest.raises(DeadlineExceeded, match=r"\[0, 2\] wait in all_gather; ranks \[1\] have not entered it"):
            stuck.result()
    finally:
        unsubscribe()
    (report,) = [event.report for event in events if isinstance(event, telemetry.Stalled) and event.report]
    assert re.match(r"faulty\.sleep_or_gather has waited \d+ s of its 3 s; 3 of 3 ranks have not answered:", report)
    for said in ("time.sleep(600)", "ranks [0, 2] wait in all_gather", "behind it: faulty.rank"):
        assert said in report
    assert not queued.done()


def test_the_stack_of_a_process_that_a_signal_stopped(faulty: Handle[Faulty]) -> None:
    def stop_and_wait(seconds: float) -> None:
        slow = faulty.sleep_or_gather.within(timeout_s=seconds).submit(1)
        time.sleep(seconds / 2)
        os.kill(faulty.group.pids[1], signal.SIGSTOP)
        try:
            slow.result()
        finally:
            os.kill(faulty.group.pids[1], signal.SIGCONT)

    says = r"signal has stopped process \d+: .*, at\n +Faulty\.sleep_or_gather \(fault_"
    pass_deadline(faulty, stop_and_wait, says)


def test_colocated_workers_and_their_process_group_restart_together(local: Cluster) -> None:
    both = local.start(colocate(one=Faulty.bind(), two=Faulty.bind()), local.pool([2]))
    with pytest.raises(WorkerDied):
        both.one.fail_on(0, "kill", "collective")
    with pytest.raises(WorkerDied, match="restart"):
        both.two.rank()
    both.two.group.restart()
    assert both.one.gather_ranks() == both.two.gather_ranks() == [[0.0, 1.0]] * 2
    both.one.group.close()
    both.two.group.close()


def test_a_group_that_is_given_up_refuses_calls_until_it_is_restarted(local: Cluster, faulty: Handle[Faulty]) -> None:
    both = local.start(colocate(one=Faulty.bind(), two=Faulty.bind()), local.pool([1]))
    with pytest.raises(WorkerDied):
        faulty.fail_on(1, "kill")
    both.one.group.give_up(faulty.group)
    with pytest.raises(WorkerDied, match=r"rank 1 of faulty .*nobody waits for this call any more"):
        both.two.rank()
    both.one.group.restart()
    assert both.two.rank() == [0]
    both.one.group.give_up(faulty.group)
    both.one.group.close()
    both.two.group.close()


def test_a_group_that_is_closed_while_it_is_restarted_leaves_no_process(local: Cluster) -> None:
    group = local.start(Faulty.bind(), local.pool([2])).group
    boot, pids = group.processes._boot, list[int]()

    def boot_and_close(until: float) -> process_calls.ProcessCalls:
        calls = boot(until)
        pids.extend(handle.pid for handle in calls.handles)
        group.close()
        return calls

    group.processes._boot = boot_and_close
    with pytest.raises(ConfigError, match="was closed while it was restarted"):
        group.restart()
    assert len(pids) == 2
    assert not all_gone(pids, LIMIT_S)


def test_other_groups_do_not_notice(local: Cluster, faulty: Handle[Faulty]) -> None:
    other = local.start(Faulty.bind(), local.pool([2]), name="bystander")
    with pytest.raises(WorkerDied):
        faulty.fail_on(0, "kill")
    assert other.gather_ranks() == [[0.0, 1.0]] * 2
    other.group.close()


@pytest.mark.parametrize("ending", ["restart", "crash"])
def test_what_a_worker_started_ends_with_it_and_siblings_keep_theirs(faulty: Handle[Faulty], ending: str) -> None:
    """In its session, in a session of its own, and orphaned into one."""
    other = faulty.group.run_on(1, start_children)
    mine = faulty.group.run_on(0, start_children)
    assert all(alive(pid) for pid in (*mine, *other))
    if ending == "restart":
        faulty.group.restart()
        mine += other
    else:
        with pytest.raises(WorkerDied):
            faulty.fail_on(0, "os._exit", "return")
    assert not all_gone(mine, LIMIT_S)
    if ending == "crash":
        assert all(alive(pid) for pid in other)


def start_children(worker: Faulty) -> list[int]:
    sleep = ["sleep", "600"]
    plain, own_session = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    )
    return [plain.pid, own_session.pid, int(orphan.stdout)]


def test_an_idle_worker_that_is_killed_is_noticed_without_a_call(faulty: Handle[Faulty]) -> None:
    lost: list[telemetry.Event] = []
    unsubscribe = telemetry.subscribe(
        lambda event: lost.append(event) if isinstance(event, telemetry.WorkerLost) else None
    )
    os.kill(faulty.group.pids[0], signal.SIGKILL)
    assert wait_for(lambda: bool(lost), LIMIT_S)
    unsubscribe()
    assert lost == [telemetry.WorkerLost(role="faulty", rank=0, node="localhost", cause="signal SIGKILL")]


def test_the_death_of_the_fork_server_is_the_death_of_its_processes_and_another_one_starts() -> None:
    with podium.connect("local") as cluster:
        slow = cluster.start(Slow.bind(), cluster.pool([2]))
        call = slow.sleep.submit(600)
        pids = slow.group.pids
        os.kill(parent_of(pids[0]), signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"fork server|SIGKILL"):
            call.result(timeout_s=LIMIT_S)
        assert not all_gone(pids, LIMIT_S)
        with pytest.raises(PodiumError):
            slow.note(1)
        slow.group.restart()
        slow.note(1)
        assert slow.noted() == [1]
        assert parent_of(slow.group.pids[0]) != parent_of(os.getpid())
        other = cluster.start(Slow.bind(), name="other")
        assert parent_of(other.group.pids[0]) == parent_of(slow.group.pids[0])


def test_processes_of_a_fork_server_end_although_another_one_starts_before_that_is_heard() -> None:
    with podium.connect("local", preload=()) as cluster:
        slow = cluster.start(Slow.bind())
        backend = cast(LocalBackend, cluster._backend)  # pyright: ignore[reportPrivateUsage] - its I/O is held up
        (old,) = list(backend.processes.values())
        go_on = threading.Event()
        backend.io.soon(partial(_wait, go_on))
        os.kill(parent_of(slow.group.pids[0]), signal.SIGKILL)
        assert wait_for(lambda: not old.server.alive(), LIMIT_S)
        starting = threading.Thread(target=lambda: cluster.start(Slow.bind(), name="other"))
        starting.start()
        assert wait_for(
            lambda: any(process.server is not old.server for process in backend.processes.copy().values()), LIMIT_S
        )
        go_on.set()
        assert old.ended.wait(LIMIT_S), "whoever waits for it would wait for ever"
        starting.join()


def _wait(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


def test_a_fork_server_that_is_stopped_goes_on_when_it_is_needed() -> None:
    with podium.connect("local") as cluster:
        slow = cluster.start(Slow.bind(), cluster.pool([2]))
        server, pids = parent_of(slow.group.pids[0]), slow.group.pids
        os.kill(server, signal.SIGSTOP)
        other = cluster.start(Slow.bind(), start_timeout_s=LIMIT_S)
        assert other.ping(3) == [3]
        os.kill(server, signal.SIGSTOP)
        slow.group.restart()
        assert not all_gone(pids, 0.0)


def test_a_handler_of_a_signal_may_call_while_the_script_waits(local: Cluster) -> None:
    """As one does that saves before a batch system ends the job. Both calls passed their deadlines before."""
    waits, saves = (local.start(Slow.bind(), name=name) for name in ("waits", "saves"))
    before, answers = signal.getsignal(signal.SIGUSR1), list[Any]()
    try:
        for asked in (saves, waits):
            ask = asked.group.function(lambda worker: worker.ctx.role).within(LIMIT_S)
            signal.signal(signal.SIGUSR1, lambda number, frame, ask=ask: answers.append(ask()))
            sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
            sender.start()
            waits.group.function(lambda worker: time.sleep(0.3)).within(LIMIT_S)()
            sender.join()
            assert wait_for(lambda: bool(answers), LIMIT_S)
            assert answers.pop() == [asked.group.name]
    finally:
        signal.signal(signal.SIGUSR1, before)
        for handle in (waits, saves):
            handle.group.close()
