"""Calls whose arguments are the results of other calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from podium.errors import DeadlineExceeded
from podium.runtime.calls.call import Call, CallArgument
from podium.runtime.watch import Watch

__all__ = ["Pipeline"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class _Waiting(NamedTuple):
    call: Call[Any]
    args: Args
    kwargs: Kwargs
    send: Callable[[Args, Kwargs], None]

    def unfinished(self) -> list[Call[Any]]:
        """The calls among the arguments that have not ended."""
        return [v.call for v in (*self.args, *self.kwargs.values()) if type(v) is CallArgument and not v.call.done()]

    def resolve_and_send(self) -> None:
        """Replace calls among the arguments by their results, and send. An error of such a call fails this one."""
        try:
            args = tuple(v.call.result() if type(v) is CallArgument else v for v in self.args)
            kwargs = {k: v.call.result() if type(v) is CallArgument else v for k, v in self.kwargs.items()}
        except Exception as error:  # noqa: BLE001 - whatever an argument's call failed with is this call's error
            self.call.fail(error)
            return
        self.send(args, kwargs)


class Pipeline:
    """The calls of one group that wait for their arguments. Calls are sent in the order of submission, so a call also
    waits for those submitted before it."""

    def __init__(self, watch: Watch) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.RLock()
        watch.register(self)

    def submit(self, call: Call[Any], args: Args, kwargs: Kwargs, send: Callable[[Args, Kwargs], None]) -> None:
        """Call ``send(args, kwargs)`` as soon as no argument is an unfinished call and nothing waits before it.

        What ``send`` raises is raised here if it is called at once, and fails ``call`` if it is called later.
        """
        new = _Waiting(call, args, kwargs, send)
        unfinished = new.unfinished() if args or kwargs else ()
        if not unfinished and not self._waiting:
            new.resolve_and_send()
            return
        with self._lock:
            self._waiting.append(new)
        for awaited in (call, *unfinished):
            awaited.when_done(self._advance)
        if not unfinished:
            self._advance()

    def _advance(self) -> None:
        """Send what can be sent, from a new thread: packing takes time, and the caller may be taking in replies."""
        threading.Thread(target=self._drain, name="podium-pipeline", daemon=True).start()

    def _drain(self) -> None:
        with self._lock:
            while self._waiting:
                first = self._waiting[0]
                if not first.call.done():
                    if first.unfinished():
                        return
                    try:
                        first.resolve_and_send()
                    except Exception as error:  # noqa: BLE001 - nobody waits here: whatever it is belongs to the call
                        first.call.fail(error)
                self._waiting.popleft()  # only now: submit() sends at once where nothing waits, and would overtake it

    def tick(self, now: float) -> None:
        """End calls whose deadline passes while they wait for their arguments: a deadline counts from submission."""
        for waiting in list(self._waiting):
            call = waiting.call
            if now >= call.deadline and not call.done():
                waits_for = ", ".join(producer.label for producer in waiting.unfinished()) or "the calls before it"
                what = f"{call.label} passed its deadline of {call.timeout_s:g} s while it waited for {waits_for}"
                call.fail(DeadlineExceeded(what, method=call.label.rpartition(".")[2]))
