"""What a peer's process speaks: one JSON object a line each way, over descriptors of its own.

A peer runs in its own environment, where Podium is not installed: this file is standard library only and is imported
both by the peers (as `protocol`, from the folder they are started in) and by bench.peer. Whatever a library prints
goes to standard error; standard output carries replies alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Method = Callable[..., Any]


class Peer:
    """The peer's end: answers requests by calling methods by name."""

    def __init__(self) -> None:
        self._replies: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._requests: TextIO = os.fdopen(os.dup(0), "r")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def next_request(self) -> tuple[str, dict[str, Any]] | None:
        """The next method and its arguments; None when the bench has closed its end."""
        line = self._requests.readline()
        if not line:
            return None
        request = json.loads(line)
        return request["method"], request["arguments"]

    def reply(self, result: object = None) -> None:
        self._replies.write(json.dumps({"result": result}) + "\n")

    def fail(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._replies.write(json.dumps({"error": text}) + "\n")

    def serve(self, methods: Mapping[str, Method]) -> None:
        """Answer until the bench closes its end; an exception is an answer too."""
        while (request := self.next_request()) is not None:
            name, arguments = request
            try:
                result = methods[name](**arguments)
            except Exception as error:  # noqa: BLE001 - crosses to the bench, which raises it there
                self.fail(error)
            else:
                self.reply(result)
        sys.stderr.flush()


class Pacer:
    """Lets a training loop run in blocks: as many steps as the bench asks for, then it waits while others run.

    `details` is asked after each block, with its first and last moment (monotonic nanoseconds), for what else to tell.
    """

    def __init__(self, peer: Peer, details: Callable[[int, int], Mapping[str, Any]]) -> None:
        self._peer = peer
        self._details = details
        self._left = 0
        self._began_ns = 0
        self._ends_ns: list[int] = []

    def wait(self) -> bool:
        """Block until the next steps are asked for; False when the bench has closed its end."""
        request = self._peer.next_request()
        if request is None:
            return False
        self._left = request[1]["count"]
        self._ends_ns = []
        self._began_ns = time.monotonic_ns()
        return True

    def step_ended(self) -> bool:
        """Note a step; after the last one of a block, answer and wait. False when the bench has closed its end."""
        self._ends_ns.append(time.monotonic_ns())
        self._left -= 1
        if self._left:
            return True
        starts_ns = [self._began_ns, *self._ends_ns]
        step_s = [(end - start) / 1e9 for start, end in zip(starts_ns, self._ends_ns, strict=False)]
        self._peer.reply({"step_s": step_s, **self._details(self._began_ns, self._ends_ns[-1])})
        return self.wait()
