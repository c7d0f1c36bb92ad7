"""trace.json shows what ran where and when, in https://ui.perfetto.dev or chrome://tracing.

    controller │ run                                                          ╷ step 1 finished
               │ collect [──── generate ────][── score ──]
               │ learn                                    [───── update ─────]
               │ calls   [submit]                         [submit]
                             ╲ flow                           ╲ flow
    generator  │ 0           [─── generate ───]                ╲
    policy     │ 0                                             [── update ──]

A process of the viewer is a role, and a track is a worker. The two halves of a step have a track each, so that steps
which overlap are seen beside each other. A slice on "calls" lasts from a call's submission until a worker took it up.
One arrow leads from there to the call's slice on each rank. Endpoints that overlap on one worker (``concurrent=True``)
move to a second track of that worker, since slices of one track must nest.

The file is in the format's JSON array form, whose closing bracket is optional: every complete line counts, so the
file also opens after a crash. Times of workers on another machine are on that machine's clock.
"""

import io
import itertools
import json
import logging
import math
import time
from pathlib import Path
from typing import IO, Any, Final

from podium.telemetry import events, metrics
from podium.telemetry.events import CallFinished, Event, StepFinished
from podium.telemetry.sinks.base import Sink

_CONTROLLER: Final = 1  # process number in the viewer; the roles follow
_RUN: Final = 1
_LANES: Final = 100  # of overlapping slices of one kind; also the distance between the first lanes of kinds
_FIRST_LANES: Final = {"collect": 100, "learn": 200}
_CALLS: Final = 1000  # lanes of overlapping calls follow: 1001, 1002, …
_COUNTERS: Final = (metrics.REWARD_MEAN, metrics.ACCURACY, metrics.LOSS, metrics.TOKENS_PER_S)
_CALLS_REMEMBERED: Final = 4096
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class TraceSink(Sink):
    """Writes to `path`, replacing what is there, or to the new `file`, in chunks of `chunk` events or once a second.

    Memory is bounded by the chunk, the number of workers and a window of recent calls. After `limit_bytes` the trace
    ends with a remark, since viewers refuse files that are much larger.
    """

    def __init__(
        self, path: str | Path, *, chunk: int = 512, limit_bytes: int = 256 * 2**20, file: IO[bytes] | None = None
    ) -> None:
        super().__init__()
        self.path = Path(path)
        if file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.TextIOWrapper(self.path.open("wb") if file is None else file, encoding="utf-8")
        self._file.write("[\n")
        self._file.flush()  # a child that is forked later must not hold a copy that it writes at its end
        self._chunk = chunk
        self._limit_bytes = limit_bytes
        self._nbytes = 2
        self._lines: list[str] = []
        self._flushed_ns = time.monotonic_ns()
        self._full = False
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, int], str] = {}  # names of tracks, by process and thread of the viewer
        self._lane_ends: dict[tuple[int, int], list[int]] = {}
        self._call_tracks: dict[tuple[str, int], int] = {}  # of the newest calls, oldest first
        self._flows = itertools.count(1)
        self._name_track(_CONTROLLER, _RUN, "run", process="controller")

    def handle(self, event: Event) -> None:
        if self._full:
            return
        self._draw(event)
        if len(self._lines) >= self._chunk or time.monotonic_ns() - self._flushed_ns > 1_000_000_000:
            self._flush()

    def _draw(self, event: Event) -> None:
        match event:
            case CallFinished():
                self._call(event)
            case events.StageFinished(name=name, step=step, started_ns=started, ended_ns=ended, half=half):
                tid = self._lane((_CONTROLLER, _FIRST_LANES[half]), started, ended, half)
                self._slice(_CONTROLLER, tid, name, started, ended, {"step": step})
            case StepFinished(step=step, metrics=values):
                self._step(step, {name: float(values[name]) for name in _COUNTERS if name in values})
            case events.WorkerStarted(role=role, rank=rank, node=node, pid=pid):
                self._instant("started", self._worker(role, rank), {"node": node, "pid": pid})
            case events.WorkerLost(role=role, rank=rank, node=node, cause=cause):
                self._instant(f"lost: {cause}", self._worker(role, rank), {"node": node})
            case events.Stalled(role=role, method=method, waiting_for=ranks, seconds=seconds):
                self._remark(f"stalled: {role}.{method}", waiting_for=list(ranks), seconds=seconds)
            case events.EvalFinished(step=step, figures=figures, items=items):
                self._remark(
                    "evaluated", step=step, items=items, **{name: str(value) for name, value in figures.items()}
                )
            case events.CheckpointSaved(step=step, path=path):
                self._remark("checkpoint saved", step=step, path=path)
            case events.Note(text=text):
                self._remark(text)
            case _:
                pass

    def finish(self) -> None:
        with self._file:
            self._flush()
            if not self._full:
                self._end("end of the run")

    # What each kind of event becomes

    def _call(self, call: CallFinished) -> None:
        origin = self._origin(call)
        pid, first_tid = self._worker(call.role, call.rank)
        tid = self._lane((pid, first_tid), call.started_ns, call.ended_ns)
        facts = {"call": call.call_id, "rank": call.rank, "node": call.node, "ok": call.ok}
        red = {} if call.ok else {"cname": "terrible"}  # the format's own name for red
        self._slice(pid, tid, call.method, call.started_ns, call.ended_ns, facts, **red)
        # A flow has exactly one start and one end, so each rank's arrow is a flow with a number of its own.
        flow = {"cat": "call", "name": f"{call.role}.{call.method}", "id": next(self._flows)}
        self._add({"ph": "s", "pid": _CONTROLLER, "tid": origin, "ts": call.submitted_ns / 1000, **flow})
        self._add({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": call.started_ns / 1000, **flow})

    def _origin(self, call: CallFinished) -> int:
        """The controller's track with the slice of this call's submission, which the first answer draws."""
        key = (call.role, call.call_id)
        if key in self._call_tracks:
            return self._call_tracks[key]
        taken_up_ns = max(call.started_ns, call.submitted_ns)
        tid = self._lane((_CONTROLLER, _CALLS), call.submitted_ns, taken_up_ns, "calls")
        name = f"submit {call.role}.{call.method}"
        self._slice(_CONTROLLER, tid, name, call.submitted_ns, taken_up_ns, {"call": call.call_id})
        if len(self._call_tracks) == _CALLS_REMEMBERED:
            del self._call_tracks[next(iter(self._call_tracks))]
        self._call_tracks[key] = tid
        return tid

    def _step(self, step: int, values: dict[str, float]) -> None:
        now_us = self.emitted_ns / 1000
        self._remark(f"step {step} finished")
        for name, value in values.items():
            if math.isfinite(value):  # JSON has no other numbers
                self._add({"ph": "C", "name": name, "pid": _CONTROLLER, "ts": now_us, "args": {"value": value}})

    def _remark(self, said: str, **facts: Any) -> None:
        self._instant(said, (_CONTROLLER, _RUN), facts)

    # Tracks

    def _worker(self, role: str, rank: int) -> tuple[int, int]:
        if role not in self._processes:
            self._processes[role] = _CONTROLLER + 1 + len(self._processes)
        pid, tid = self._processes[role], 1 + rank * _LANES
        if (pid, tid) not in self._tracks:
            self._name_track(pid, tid, f"{role} {rank}", process=role)
        return pid, tid

    def _lane(self, first: tuple[int, int], started_ns: int, ended_ns: int, name: str = "") -> int:
        """The first track from `first` on where this slice overlaps none; `name` is for a track that has none yet."""
        ends, (pid, first_tid) = self._lane_ends.setdefault(first, []), first
        lane = next((i for i, end in enumerate(ends) if end <= started_ns), len(ends))
        lane = min(lane, _LANES - 1)
        if lane == len(ends):
            ends.append(0)
        ends[lane] = max(ends[lane], ended_ns)
        if (pid, first_tid + lane) not in self._tracks:  # only now: a name for each call would cost time
            self._name_track(pid, first_tid + lane, self._tracks[first] + f" (+{lane})" if lane else name)
        return first_tid + lane

    def _name_track(self, pid: int, tid: int, name: str, process: str | None = None) -> None:
        self._tracks[pid, tid] = name
        where = {"ph": "M", "pid": pid, "tid": tid}
        if process is not None:
            self._add(where | {"name": "process_name", "args": {"name": process}})
            self._add(where | {"name": "process_sort_index", "args": {"sort_index": pid}})
        self._add(where | {"name": "thread_name", "args": {"name": name}})
        self._add(where | {"name": "thread_sort_index", "args": {"sort_index": tid}})

    # Lines

    def _slice(
        self, pid: int, tid: int, name: str, started_ns: int, ended_ns: int, args: dict[str, Any], **style: str
    ) -> None:
        begin_us, length_us = started_ns / 1000, max(0, ended_ns - started_ns) / 1000
        where = {"pid": pid, "tid": tid, "ts": begin_us, "dur": length_us}
        self._add({"ph": "X", "name": name, **where, "args": args, **style})

    def _instant(self, name: str, where: tuple[int, int], args: dict[str, Any]) -> None:
        position = {"pid": where[0], "tid": where[1], "ts": self.emitted_ns / 1000}
        self._add({"ph": "i", "s": "t", "name": name, **position, "args": args})

    def _add(self, line: dict[str, Any]) -> None:
        self._lines.append(_encode(line) + ",\n")

    def _flush(self) -> None:
        self._flushed_ns = time.monotonic_ns()
        text = "".join(self._lines)
        self._lines.clear()
        self._file.write(text)
        self._file.flush()
        self._nbytes += len(text)
        if self._nbytes >= self._limit_bytes and not self._full:
            self._end(f"the trace ends here, at its limit of {self._limit_bytes} bytes")
            self._full = True
            logging.getLogger("podium.telemetry").warning(
                "%s reached its limit of %d bytes and ends; the run goes on", self.path, self._limit_bytes
            )

    def _end(self, remark: str) -> None:
        # The one line without a comma, then the bracket that makes the file plain JSON.
        self._remark(remark)
        self._file.write(self._lines.pop().rstrip(",\n") + "\n]\n")
        self._file.flush()
