"""Contract: calls in flight: order, overlap, waiting, cancelling, deadlines, calls as arguments, errors."""

import asyncio
import pdb
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from podium.errors import CallCancelled, ConfigError, DeadlineExceeded, EndpointError, PodiumError, SerializationError
from podium.runtime import Cluster, Handle, Worker, endpoint, first, per_rank, wait
from podium_testing.target import LIMIT_S, need, refuses, started, wait_for
from podium_testing.workers import Counter, Keeper, Probe, Sleeper

__all__ = ["CallContract"]


class _Producer(Worker):
    def __init__(self) -> None:
        self.told = threading.Event()

    @endpoint(collect=first())
    def make(self, seconds: float, value: str) -> str:
        time.sleep(seconds)
        return value

    @endpoint(collect=first())
    def make_when_told(self, value: str) -> str:
        self.told.wait(60.0)
        self.told.clear()
        return value

    @endpoint(concurrent=True)
    def tell(self) -> None:
        self.told.set()


class CallContract:
    shared_sleeper = started(Sleeper.bind(), 2, distributed=False)
    producer = started(_Producer.bind(), 1, name="producer", distributed=False)

    @pytest.fixture
    @classmethod
    def sleeper(cls, shared_sleeper: Handle[Sleeper]) -> Iterator[Handle[Sleeper]]:
        """A sleeper that is as after its start. Each test would need two new processes otherwise."""
        yield shared_sleeper
        shared_sleeper.set_event()
        shared_sleeper.forget.within(timeout_s=LIMIT_S)()

    @pytest.fixture
    @classmethod
    def live(cls, cluster: Cluster, sleeper: Handle[Sleeper]) -> Handle[Sleeper]:
        """A sleeper whose calls run while the caller goes on."""
        need(cluster, "concurrent")
        return sleeper

    def test_submit_gives_a_call_and_result_its_value(self, sleeper: Handle[Sleeper]) -> None:
        call = sleeper.double.submit(4)
        assert call.result() == [8, 8]
        assert call.done()
        assert call.result() == [8, 8]
        assert not call.cancel()
        assert "sleeper" in repr(call)
        assert "double" in repr(call)

    def test_waiting_less_long_does_not_cancel(self, live: Handle[Sleeper]) -> None:
        call = live.wait_for_event.submit(60.0)
        with pytest.raises(TimeoutError, match=r"sleeper.*\.wait_for_event has no result after 0\.05 s"):
            call.result(timeout_s=0.05)
        assert not call.done()
        live.set_event()
        assert call.result() == [True, True]

    def test_submitting_does_not_wait(self, live: Handle[Sleeper]) -> None:
        calls = [live.wait_for_event.submit(LIMIT_S) for _ in range(5)]
        live.set_event()
        assert [call.result() for call in calls] == [[True, True]] * 5

    def test_a_call_can_be_awaited_and_raises_what_it_raised(self, cluster: Cluster, sleeper: Handle[Sleeper]) -> None:
        probe = cluster.start(Probe.bind(), distributed=False)

        async def main() -> list[list[str]]:
            with pytest.raises(EndpointError, match="awaited"):
                await probe.fail.submit([0], KeyError("awaited"))
            return await asyncio.gather(*[sleeper.nap.submit(0.01, str(at)) for at in range(3)])

        assert asyncio.run(main()) == [[str(at)] * 2 for at in range(3)]

    def test_the_event_loop_goes_on_while_a_call_is_awaited(self, live: Handle[Sleeper]) -> None:

        async def main() -> list[bool]:
            task = asyncio.ensure_future(live.wait_for_event.submit(LIMIT_S))
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert not task.done()
            await live.set_event.submit()
            return await task

        assert asyncio.run(main()) == [True, True]

    def test_a_time_out_of_asyncio_cancels_the_call_unless_it_is_shielded(self, live: Handle[Sleeper]) -> None:
        async def main() -> None:
            call = live.nap.submit(60.0, "left")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(call), 0.05)
            assert not call.done()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.05)
            refuses(CallCancelled, "was cancelled", call.result)

        asyncio.run(main())
        assert live.history() == [["left cancelled"]] * 2

    def test_a_debugger_without_a_terminal_says_where_there_is_one(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        counter = cluster.start(Counter.bind(), distributed=False)
        refuses(
            EndpointError, r"no terminal for a debugger: .*connect\('inline'\), or attach", counter.group.run, _debug
        )

    def test_the_synchronous_api_works_inside_a_running_loop(self, cluster: Cluster) -> None:
        async def main() -> list[int]:
            return cluster.start(Counter.bind(), cluster.pool([2]), distributed=False).add(2)

        assert asyncio.run(main()) == [2, 2]

    def test_calls_run_in_the_order_submitted(self, sleeper: Handle[Sleeper]) -> None:
        calls = [sleeper.note.submit(str(at)) if at % 3 else sleeper.nap.submit(0.0, str(at)) for at in range(200)]
        for call in calls:
            call.result()
        assert sleeper.history() == [[str(at) for at in range(200)]] * 2
        assert sleeper.peek() == sleeper.history(), "concurrent endpoints answer without overlap too"

    def test_each_thread_of_the_caller_keeps_its_order(self, sleeper: Handle[Sleeper]) -> None:
        def submit(name: str) -> None:
            for call in [sleeper.note.submit(f"{name}{at}") for at in range(100)]:
                call.result()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(submit, "abcd"))
        first_rank, second_rank = sleeper.history()
        assert first_rank == second_rank, "ranks that see calls in different orders deadlock in their collectives"
        for name in "abcd":
            assert [label for label in first_rank if label[0] == name] == [f"{name}{at}" for at in range(100)]

    def test_one_call_runs_at_a_time(self, live: Handle[Sleeper]) -> None:
        calls = [live.sleep.submit(0.1, "first"), live.nap.submit(0.1, "second"), live.note.submit("third")]
        for call in calls:
            call.result()
        assert live.history() == [["first", "second", "third"]] * 2

    def test_concurrent_endpoints_overlap_with_a_running_call(self, live: Handle[Sleeper]) -> None:
        for free_it in (live.set_event, live.set_event_async):
            waiting = live.wait_for_event.submit(LIMIT_S)
            free_it()
            assert waiting.result(LIMIT_S) == [True, True]
            live.group.run(lambda worker: worker.event.clear())

    def test_what_an_endpoint_returns_undone_is_waited_for(self, sleeper: Handle[Sleeper]) -> None:
        assert sleeper.begun(0.1, "future") == ["future"] * 2
        assert sleeper.begun(0.1, "coroutine") == ["coroutine"] * 2
        assert sleeper.begun_async(0.1, "task") == ["task"] * 2
        assert sleeper.history() == [["future", "coroutine", "task"]] * 2
        assert sleeper.group.run(_break_future, KeyError) == [None, None]
        with pytest.raises(EndpointError, match="KeyError: 'of the future'"):
            sleeper.group.run(_break_future)

    def test_the_first_calls_to_end_can_be_waited_for(self, live: Handle[Sleeper], producer: Handle[_Producer]) -> None:
        slow, at_once = live.wait_for_event.submit(60.0), producer.make.submit(0.0, "at once")
        quick = producer.make.submit(0.1, "quick")
        assert wait([slow, quick, at_once], first=1)[0] in ([at_once], [quick, at_once])
        assert wait([slow, quick, at_once], first=2) == ([quick, at_once], [slow])
        assert wait([slow, slow], timeout_s=0.1) == ([], [slow, slow])
        assert wait([slow], first=0) == wait([slow], first=0, timeout_s=9.0) == ([], [slow])
        assert wait([]) == ([], [])
        with pytest.raises(CallCancelled):
            cancelled = live.note.submit("behind the slow one")
            assert cancelled.cancel()
            assert wait([cancelled]) == ([cancelled], [])
            cancelled.result()
        live.set_event()
        assert wait([slow, quick]) == ([slow, quick], [])
        refuses(ConfigError, r"wait\(first=3\): .* the 2 calls", wait, [slow, quick], first=3)

    def test_a_queued_call_is_dropped(self, live: Handle[Sleeper]) -> None:
        busy = live.wait_for_event.submit(60.0, "busy")
        queued = live.note.submit("queued")
        assert queued.cancel()
        assert not queued.cancel()
        refuses(CallCancelled, r"\.note was cancelled", queued.result)
        live.set_event()
        busy.result()
        assert live.history() == [["busy"], ["busy"]]

    def test_a_running_async_endpoint_is_cancelled(self, live: Handle[Sleeper]) -> None:
        running = live.nap.submit(60.0, "nap")
        _wait_until_running(live)
        assert running.cancel()
        assert live.history() == [["nap cancelled"], ["nap cancelled"]]

    def test_a_running_sync_endpoint_goes_on_unheard(self, live: Handle[Sleeper]) -> None:
        running = live.wait_for_event.submit(60.0, "goes on")
        _wait_until_running(live)
        assert running.cancel()
        with pytest.raises(CallCancelled):
            running.result()
        live.set_event()
        assert live.history() == [["goes on"], ["goes on"]]

    def test_a_deadline_names_the_ranks_the_method_and_the_stack(self, live: Handle[Sleeper]) -> None:
        error, timeout_s = _pass_deadline(
            live, lambda timeout_s: live.wait_for_event.within(timeout_s=timeout_s)(600.0)
        )
        assert isinstance(error, TimeoutError)
        assert (error.method, error.running) == ("wait_for_event", (0, 1))
        for phrase in (f"deadline of {timeout_s:g} s", "rank 1", "self.event.wait(seconds)", "sleeper"):
            assert phrase in str(error)

    def test_a_deadline_cancels_an_async_endpoint(self, live: Handle[Sleeper]) -> None:
        error, _ = _pass_deadline(live, lambda seconds: live.nap.within(timeout_s=seconds)(600.0, "nap"))
        assert "await asyncio.sleep" in str(error)
        assert live.history() == [["nap cancelled"], ["nap cancelled"]]

    def test_behind_a_stuck_call_the_deadline_says_who_is_busy(self, live: Handle[Sleeper]) -> None:
        stuck = live.wait_for_event.submit(600.0, "stuck")
        _wait_until_running(live)
        busy = r"\.note passed its deadline(.|\n)*runs sleeper\S*\.wait_for_event since"
        with pytest.raises(DeadlineExceeded, match=busy):
            live.note.within(timeout_s=0.2)("late")
        live.set_event()
        stuck.result()
        assert live.history() == [["stuck"], ["stuck"]], "a queued call whose deadline passed is dropped"

    def test_a_deadline_holds_where_calls_run_at_once_too(self, sleeper: Handle[Sleeper]) -> None:
        with pytest.raises(DeadlineExceeded, match=r"\.sleep"):
            sleeper.sleep.within(timeout_s=0.1)(0.6)
        assert sleeper.double(2) == [4, 4]

    def test_a_groups_deadline_is_the_default_of_its_calls(self, cluster: Cluster) -> None:
        sleeper = cluster.start(Sleeper.bind(), timeout_s=0.1, distributed=False)
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.1 s"):
            sleeper.sleep(0.6)
        assert sleeper.sleep.within(timeout_s=LIMIT_S)(0.2) == ["sync"]

    def test_a_function_and_chosen_ranks_keep_a_deadline_of_their_own(self, live: Handle[Sleeper]) -> None:
        with pytest.raises(DeadlineExceeded, match=r"sleeper\S*\._rest passed its deadline of 0\.2 s; 1 of 1 rank"):
            live.group.function(_rest, on=1).within(timeout_s=0.2)()
        second = live.group.on(1).wait_for_event
        error, _ = _pass_deadline(live, lambda seconds: second.within(timeout_s=seconds)(600.0), ranks=1)
        assert error.running == (1,)
        assert live.group.on(0).double.within(timeout_s=LIMIT_S)(1) == [2]

    def test_a_deadline_is_a_positive_number(self, sleeper: Handle[Sleeper]) -> None:
        for wrong in (0, -1, float("nan")):
            refuses(ConfigError, "positive number of seconds", sleeper.sleep.within, timeout_s=wrong)

    def test_a_finished_call_is_an_argument(self, sleeper: Handle[Sleeper]) -> None:
        done = sleeper.double.submit([1])
        done.result()
        assert sleeper.double(done.arg()) == [[[1, 1], [1, 1]] * 2] * 2

    def test_an_unfinished_call_is_an_argument_and_order_holds_behind_it(
        self, sleeper: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        made = producer.make.submit(0.2, "from the producer")
        calls = [sleeper.note.submit(made.arg()), sleeper.note.submit("behind it")]
        calls.append(sleeper.note.submit(label=producer.make.submit(0.0, "third").arg()))
        for call in calls:
            call.result(LIMIT_S)
        assert sleeper.history() == [["from the producer", "behind it", "third"]] * 2

    def test_what_stays_in_the_controller_says_how_to_pass_it(self, cluster: Cluster, sleeper: Handle[Sleeper]) -> None:
        call = sleeper.double.submit(1)
        for value, says in (
            (call, r"call\.arg\(\)"),
            (_Times(call.arg()), r"call\.arg\(\) is passed as an argument, or in a list"),  # pyright: ignore[reportArgumentType] - the point
            ({"a": per_rank([1, 2])}, "must be a whole argument"),
            (sleeper.group, r"pass the handle"),
            (cluster.start_replicas(Counter.bind(), 1, name="stays", distributed=False), r"pass list\(replicas\)"),
        ):
            refuses(SerializationError, says, sleeper.double, value)

    def test_calls_in_lists_tuples_and_dicts_are_arguments(
        self, sleeper: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        slow, quick = producer.make.submit(0.2, "slow"), producer.make.submit(0.0, "quick")
        nested: Any = {"both": [slow.arg(), (quick.arg(), 3)], "none": [1, {"x": ()}]}
        nested["itself"] = nested["none"]
        made = sleeper.double.submit([nested])
        calls = [sleeper.note.submit([slow.arg(), quick.arg()]), sleeper.note.submit("behind it")]  # pyright: ignore[reportArgumentType]
        filled = {"both": ["slow", ("quick", 3)], "none": [1, {"x": ()}], "itself": [1, {"x": ()}]}
        assert made.result(LIMIT_S) == [[filled] * 2] * 2
        assert type(nested["both"][1]) is tuple and nested["both"][0] != "slow", "the caller's own is as it was"
        for call in calls:
            call.result(LIMIT_S)
        assert sleeper.history() == [[["slow", "quick"], "behind it"]] * 2
        endless: list[Any] = [1]
        endless.append(endless)
        assert len(sleeper.double([endless, slow.arg()])[0]) == 4

    def test_what_the_caller_changes_while_a_call_waits_is_not_seen(
        self, live: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        made = producer.make_when_told.submit("made")
        value, nested = torch.ones(1000), [1, {"x": [2]}]
        calls = [live.double.submit([made.arg(), value, nested])]
        calls += [live.double.submit([value, nested]) for _ in range(2)]  # behind the one that waits
        value.zero_()
        nested[1]["x"].append(3)  # pyright: ignore[reportIndexIssue, reportUnknownMemberType]
        nested.append(4)
        producer.tell()
        for at, call in enumerate(calls):
            for got in call.result(LIMIT_S):
                assert got[-1] == [1, {"x": [2]}]
                assert int(got[-2].sum()) == 1000
                assert at or got[0] == "made"

    def test_a_result_that_the_caller_changes_is_passed_on_as_it_was(
        self, sleeper: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        for size in (10, 1_000_000) * 10:
            made: Any = producer.make.submit(0.01, torch.ones(size))  # pyright: ignore[reportArgumentType]
            doubled = sleeper.double.submit(made.arg())
            assert made.result() is made.result()
            made.result().zero_()
            assert [float(got.sum()) for got in doubled.result(LIMIT_S)] == [2 * size] * 2

    def test_calls_are_values_for_each_rank(self, cluster: Cluster, producer: Handle[_Producer]) -> None:
        probe = cluster.start(Probe.bind(), cluster.pool([2]), distributed=False)
        values = [producer.make.submit(0.1 * at, f"value {at}").arg() for at in range(2)]
        assert [own for _, own, _ in probe.scattered(per_rank(values))] == ["value 0", "value 1"]  # pyright: ignore[reportArgumentType]

    def test_a_call_in_a_list_that_fails_fails_its_consumer(self, cluster: Cluster, sleeper: Handle[Sleeper]) -> None:
        probe = cluster.start(Probe.bind(), name="failing", distributed=False)
        broken = probe.fail.submit([0], ValueError("no value"))
        consumer = sleeper.double.submit({"x": [1, broken.arg()]})
        with pytest.raises(EndpointError, match=r"failing\.fail raised ValueError.*no value"):
            consumer.result(LIMIT_S)

    def test_calls_can_form_a_chain(self, producer: Handle[_Producer]) -> None:
        call = producer.make.submit(0.05, "x")
        for _ in range(20):
            call = producer.make.submit(0.0, call.arg())
        assert call.result(LIMIT_S) == "x"

    @pytest.mark.parametrize("failed", [True, False])
    def test_the_failure_of_a_producer_fails_its_consumer_and_not_the_submission(
        self, cluster: Cluster, sleeper: Handle[Sleeper], failed: bool
    ) -> None:
        probe = cluster.start(Probe.bind(), name="failing", distributed=False)
        broken = probe.fail.submit([0], ValueError("no value"))
        if failed:
            broken.wait()
        consumer = sleeper.double.submit(broken.arg())
        with pytest.raises(EndpointError, match=r"failing\.fail raised ValueError.*no value"):
            consumer.result(LIMIT_S)
        assert sleeper.double(3) == [6, 6]

    def test_a_slow_producer_does_not_stretch_its_consumers_deadline(
        self, live: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        slow = producer.make_when_told.submit("late")
        with pytest.raises(DeadlineExceeded, match=r"\.double.*producer\.make_when_told"):
            live.double.within(timeout_s=0.2)(slow.arg())
        assert not slow.done()
        assert live.double("x") == ["xx", "xx"]
        producer.tell()
        assert slow.result() == "late"

    def test_a_consumer_that_is_cancelled_lets_those_behind_it_go(
        self, live: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        slow = producer.make_when_told.submit("late")
        consumer, behind = live.double.submit(slow.arg()), live.double.submit(1)
        assert consumer.cancel()
        assert behind.result(LIMIT_S) == [2, 2]
        assert not slow.done()
        producer.tell()

    def test_wrong_arguments_behind_an_unfinished_call_fail_the_call(
        self, live: Handle[Sleeper], producer: Handle[_Producer]
    ) -> None:
        slow = producer.make.submit(0.2, "late")
        wrong = live.double.submit(slow.arg(), 2)  # pyright: ignore[reportCallIssue] - the point: one too many
        refuses(ConfigError, r"\.double\(\) takes 1 positional", wrong.result, LIMIT_S)

    def test_an_error_names_method_and_rank_and_brings_its_traceback(self, cluster: Cluster) -> None:
        probe = cluster.start(Probe.bind(), cluster.pool([3]), name="probe_e", distributed=False)
        with pytest.raises(EndpointError) as caught:
            probe.fail([1], KeyError("the cause"))
        error = caught.value
        assert (error.method, error.rank, error.role) == ("fail", 1, "probe_e")
        assert isinstance(error, PodiumError)
        assert isinstance(error.__cause__, KeyError)
        assert error.__cause__.args == ("the cause",)
        assert "raise error" in error.remote_traceback
        assert "worker_process.py" not in error.remote_traceback, "the runtime's own frames are no help"
        again = pickle.loads(pickle.dumps(error))
        assert vars(again).items() >= {(name, vars(error)[name]) for name in ("method", "rank", "remote_traceback")}
        assert str(again) == str(error)

    def test_a_group_whose_ranks_all_raise_alike_stays_usable(self, cluster: Cluster) -> None:
        probe = cluster.start(Probe.bind(), cluster.pool([3]))
        for _ in range(3):
            with pytest.raises(EndpointError, match="ValueError"):
                probe.fail([0, 1, 2], ValueError("alike"))
            assert probe.rank() == [0, 1, 2]

    def test_leaving_python_in_an_endpoint_is_an_error_of_it(self, cluster: Cluster) -> None:
        leaver = cluster.start(_Leaver.bind(), distributed=False)
        for leave in (leaver.leave, leaver.leave_async, leaver.leave_concurrently):
            for error in (SystemExit(3), GeneratorExit("left"), asyncio.CancelledError("left")):
                with pytest.raises(EndpointError, match=type(error).__name__) as caught:
                    leave.within(timeout_s=LIMIT_S)(error)
                assert type(caught.value.__cause__) is type(error)
        assert leaver.still_here.within(timeout_s=LIMIT_S)() == [True]

    def test_a_worker_inside_a_worker_is_an_ordinary_object(self, cluster: Cluster) -> None:
        keeper = cluster.start(Keeper.bind(10), cluster.pool([2]), distributed=False)
        assert keeper.inner_add(5) == [(15, 0, [2, 4]), (16, 1, [2, 4])]

    def test_functions_are_shipped_to_all_ranks_or_one(self, cluster: Cluster) -> None:
        counter = cluster.start(Counter.bind(1), cluster.pool([2]), distributed=False)
        offset = 10
        assert counter.group.run(lambda worker, x: worker.count + x + offset, 5) == [16, 16]
        assert counter.group.run(_add_as_method, amount=2) == [3, 3]
        assert counter.group.run_on(1, _add_as_method, 4) == 7
        assert counter.group.run_on(-1, lambda worker: worker.ctx.rank) == 1
        assert counter.group.run(_sum, 1, 2, plus=3) == [6, 6]
        assert counter.group.run(getattr, "count") == counter.add(0)
        assert counter.group.run(partial(_sum, plus=3), 1) == [4, 4]
        assert counter.group.run(_Times(2), 4) == [8, 8]
        assert "getattr" in repr(counter.group.function(getattr))
        refuses(ConfigError, r"run_on\(rank=2\)", counter.group.run_on, 2, _add_as_method, 4)
        with pytest.raises(EndpointError, match="ZeroDivisionError"):
            counter.group.run(lambda worker: 1 // 0)


def _break_future(worker: Sleeper, *caught: type[Exception]) -> Any:
    def work() -> None:
        if not caught:
            raise KeyError("of the future")

    return ThreadPoolExecutor(1).submit(work)


class _Leaver(Worker):
    @endpoint
    def leave(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def leave_async(self, error: BaseException) -> None:
        raise error

    @endpoint(concurrent=True)
    def leave_concurrently(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def still_here(self) -> bool:
        return True


def _add_as_method(worker: Counter, amount: int) -> int:
    worker.count += amount
    return worker.count


def _sum(worker: Counter, *numbers: int, plus: int = 0) -> int:
    return sum(numbers) + plus


def _debug(worker: Counter) -> None:
    pdb.Pdb(nosigint=True).set_trace()


class _Times:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, worker: Counter, value: int) -> int:
        return self.factor * value


def _rest(worker: Sleeper) -> None:
    worker.event.wait(60.0)


def _wait_until_running(sleeper: Handle[Sleeper]) -> None:
    """Wait until a call that was submitted just now has begun on every rank."""
    assert wait_for(lambda: all(sleeper.count_entered()), LIMIT_S)


def _pass_deadline(
    sleeper: Handle[Sleeper], call: Callable[[float], object], ranks: int = 2
) -> tuple[DeadlineExceeded, float]:
    """Have ``call``, which gets the seconds, pass its deadline while it runs. Returns the error and the seconds.

    Where a busy machine did not begin the call on its ranks in time, a longer deadline is tried.
    """
    for timeout_s in (0.3, 3.0, 30.0):
        with pytest.raises(DeadlineExceeded) as caught:
            call(timeout_s)
        if sum(sleeper.count_entered()) >= ranks:
            return caught.value, timeout_s
        sleeper.set_event()
        sleeper.forget()
    pytest.fail(f"no call began within {timeout_s:g} s")
