"""The calls of workers where nobody fetches them any more."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

import podium
from podium.errors import CallCancelled, DeadlineExceeded, SerializationError
from podium.runtime import Call, Reply
from podium.runtime.calls.relay import UNANSWERED_S, Outbox, Relay, Wanted, reachable
from podium.runtime.exception_pickling import unpack_exception
from podium.runtime.messages import Failure
from podium_testing.workers import Counter
from tests.waits import LONG_S


def keep(label: str, value: Any) -> Any:
    return value


def test_a_call_that_the_script_never_fetches_ends_after_its_deadline() -> None:
    outbox = Outbox(keep)
    call = outbox.submit(Wanted(0, "key", "group.method", values={"x": 1}, timeout_s=5.0), by_reference=True)
    now = time.monotonic()
    outbox.tick(now + 5.0)
    assert not call.done(), "the script decides when a deadline has passed, and its answer may be on the way"
    outbox.tick(now + 6.0 + UNANSWERED_S)
    with pytest.raises(
        DeadlineExceeded, match=r"group\.method passed its deadline of 5 s, and the script .* not answered"
    ):
        call.result()


def test_a_call_is_handed_out_once_and_in_order_and_giving_up_comes_after() -> None:
    outbox = Outbox(keep)
    values = [1, 2]
    first, second = (
        outbox.submit(Wanted(0, "key", name, values={"x": values}, timeout_s=5.0), by_reference=False)
        for name in ("first", "second")
    )
    values.append(3)
    assert second.cancel()
    taken = [outbox.take() for _ in range(3)]
    assert [(wanted.number, wanted.label) for wanted in taken if wanted] == [(1, "first"), (2, "second"), (2, "")]
    assert taken[0] is not None
    assert taken[0].values == {"x": [1, 2]}, "what the caller changes after submitting is not seen"
    outbox.deliver(1, "done", None)
    outbox.deliver(2, "late", None)
    assert first.result() == "done"
    outbox.close()
    assert outbox.take() is None


def test_a_result_that_the_worker_cannot_read_is_an_error_of_its_call() -> None:
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    relay = Relay(None, lambda *request: asked.put(request), lambda payload: payload)
    with podium.connect("inline") as cluster:
        counter = cluster.start(Counter.bind(1), distributed=False)
        relay.poll([3])
        ranks, method, _, hear = asked.get(timeout=LONG_S)
        assert (ranks, method) == ([3], "take_call")
        hear(3, Reply("ok", Wanted(7, counter.group.key, "counter.add", "add", values={"amount": 1}, timeout_s=LONG_S)))
        requests = [asked.get(timeout=LONG_S) for _ in range(2)]
        ((_, _, values, delivered),) = [request for request in requests if request[1] == "deliver"]
        assert values == {"number": 7, "value": [2]}
        delivered(3, Reply("error", Failure("SerializationError", "the class is unknown here", "", None, False)))
        ranks, method, values, _ = asked.get(timeout=LONG_S)
        assert (ranks, method, values["number"]) == ([3], "deliver", 7)
        assert isinstance(values["error"], SerializationError)
        assert "the class is unknown here" in str(values["error"])


def test_a_call_that_is_submitted_while_its_worker_dies_is_cancelled() -> None:
    class Group:
        def submit_for(self, caller: object, wanted: Wanted) -> Call[Any]:
            relay.drop(3)  # the death is told in this moment
            calls.append(Call(wanted.label, wanted.timeout_s, cast(Any, SimpleNamespace(wake=lambda: None))))
            return calls[0]

    calls: list[Call[Any]] = []
    group = Group()
    reachable["one group"] = group
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    relay = Relay(None, lambda *request: asked.put(request), lambda payload: payload)
    relay.poll([3])
    _, _, _, hear = asked.get(timeout=LONG_S)
    hear(3, Reply("ok", Wanted(7, "one group", "counter.add", "add", timeout_s=LONG_S)))
    asked.get(timeout=LONG_S)  # the next poll, or the end of this call
    with pytest.raises(CallCancelled):
        calls[0].result(timeout_s=0)


def test_what_a_group_raises_is_the_cause_of_the_workers_error() -> None:
    """Such as the TypeError of an argument too many, which is no error of Podium's."""
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    relay = Relay(None, lambda *request: asked.put(request), lambda payload: payload)

    class Group:
        def submit_for(self, caller: object, wanted: Wanted) -> Call[Any]:
            raise TypeError("too many arguments")

    group = Group()
    reachable["key"] = cast(Any, group)
    relay._make(0, Wanted(1, "key", "group.method"))
    _, method, answer, _ = asked.get(timeout=LONG_S)
    assert method == "deliver"
    assert "in submit_for" in answer["error"].remote_traceback
    assert repr(unpack_exception(answer["cause"])) == "TypeError('too many arguments')"
