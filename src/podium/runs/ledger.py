"""The ledger of a run: each prompt that was taken from the data is in exactly one state.

    taken ─▶ rolled_out ─▶ graded ─▶ trained
      └──────────┴───────────┴─────▶ dropped, for a reason

Prompts are numbered in the order in which the run takes them, from 0. A state is only followed by a later one, so no
prompt is trained twice. ``ledger.jsonl`` has a line for each change of the prompts of a step:

    {"first": 0}
    {"state": "taken", "step": 3, "prompts": [16, 17]}
    {"state": "rolled_out", "step": 3, "prompts": [16, 17], "versions": [[2, 2], [1, 2]]}

``versions`` are those of the oldest and the newest weights that drew a prompt's tokens. A checkpoint has the length of
the file, which is on the disk before ``latest`` moves. A run that is resumed cuts the file to this length, because the
weights that were trained later are lost. Prompts that were in flight at the checkpoint are "returned": they are taken
again under their numbers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, NotRequired, cast

from typing_extensions import TypedDict

from podium.errors import CheckpointError, DataError, PodiumError
from podium.runs.run_files import RunFiles
from podium.runs.run_json import Count, read_lines, write_json

_STATES: Final = ("returned", "taken", "rolled_out", "graded", "trained", "dropped")
_RETURNED, _TAKEN, _, _, _TRAINED, _DROPPED = range(len(_STATES))
_IN_FLIGHT: Final = ("taken", "rolled_out", "graded")


class First(TypedDict):
    """The first line of a ledger."""

    first: Count


class Entry(TypedDict):
    """Any other line: the next state of some prompts, of a step unless they were returned."""

    state: Literal["returned", "taken", "rolled_out", "graded", "trained", "dropped"]
    step: NotRequired[Count]
    prompts: list[Count]
    versions: NotRequired[list[tuple[int, int]]]
    reason: NotRequired[str]


class Ledger:
    """The states of a run's prompts, kept in the file at ``path``.

    Args:
        path: The file. An existing file is continued.
        first: The number of the prompt that the run takes next.
        size: Number of bytes of the file that count. What follows is cut off.

    Raises:
        CheckpointError: The file is shorter than ``size``, is no ledger, or belongs to another run.
    """

    def __init__(self, path: Path, first: int = 0, size: int = 0) -> None:
        self.path = path
        self.states, self._suspects = States(), set[int]()
        self._lock = Lock()  # the two halves of steps may run at the same time
        self._size = size
        self._file = RunFiles(path.parent).append(path.name)
        try:
            self._continue(first)
        except BaseException:
            self._file.close()
            raise

    def _continue(self, first: int) -> None:
        """Read the bytes that count, and cut off the others."""
        size, present = self._size, self._file.seek(0, os.SEEK_END)
        if present < size:
            raise CheckpointError(
                f"{self.path} has {present} bytes, and had {size} when the checkpoint was made: put the run's own file "
                "back"
            )
        self._file.seek(0)
        self.states.read(self._file.read(size), self.path)
        self._file.truncate(size)
        if not size:
            self._write({"first": first})
        if in_flight := self.states.in_flight():
            self._write({"state": "returned", "prompts": in_flight})
        if self.states.next != first:
            raise CheckpointError(
                f"{self.path} goes on at prompt {self.states.next}, and the checkpoint at prompt {first}: put the "
                "run's own file back"
            )

    def take(self, step: int, until: int, suspects: Mapping[int, str] | None = None) -> None:
        """Enter as taken for ``step`` all prompts with numbers below ``until`` that have no entry yet. Those among the
        ``suspects`` are entered as dropped, each for its reason."""
        prompts, reasons = self.states.open_before(until), suspects or {}
        if not prompts:
            return
        lines: list[Mapping[str, Any]] = [{"state": "taken", "step": step, "prompts": prompts}]
        for reason in dict.fromkeys(reasons[prompt] for prompt in prompts if prompt in reasons):
            dropped = [prompt for prompt in prompts if reasons.get(prompt) == reason]
            self._suspects.update(dropped)
            lines.append({"state": "dropped", "step": step, "prompts": dropped, "reason": reason})
        self._write(*lines)

    def prompts(self, step: int) -> list[int]:
        """Return the prompts that ``step`` plays, in its order, while some of them are in flight."""
        return [prompt for prompt in self.states.by_step.get(step, ()) if prompt not in self._suspects]

    def move(self, step: int, state: str, places: Iterable[int] | None = None, **more: Any) -> None:
        """Enter the next state of the prompts of ``step``, if the step has prompts. ``more`` are further fields of the
        entry.

        Args:
            places: Which of the prompts, by their place in the step; None for all of them.

        Raises:
            PodiumError: A prompt is in that state already, or in a later one.
        """
        if prompts := self.prompts(step):
            prompts = self.states.in_flight([step]) if places is None else [prompts[index] for index in places]
            self._write({"state": state, "step": step, "prompts": prompts, **more})

    def drop_others(self, step: int, places: Collection[int], reason: str) -> None:
        """Enter that the prompts of ``step`` which are in flight, but for those at ``places``, are dropped."""
        prompts = enumerate(self.prompts(step))
        if gone := [place for place, prompt in prompts if place not in places and not self.states.is_over(prompt)]:
            self.move(step, "dropped", gone, reason=reason)

    def drop(self, reason: str, step: int) -> None:
        """Enter that all prompts which are neither trained nor dropped are dropped. ``step`` would have been the next
        one: it takes those that were in flight at the checkpoint of a resumed run and that no step took again."""
        self.take(step, self.states.end)
        for begun in list(self.states.by_step):
            self.move(begun, "dropped", reason=reason)

    def sync(self) -> tuple[int, int]:
        """Return the length of the file, once all of it is on the disk, and the prompt with which a run goes on from
        there."""
        with self._lock:
            os.fsync(self._file.fileno())
            return self._size, min([self.states.next, *self.states.in_flight()])

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with suppress(OSError):  # a write failed before, and its error was raised there
            self._file.close()

    def _write(self, *lines: Mapping[str, Any]) -> None:
        with self._lock:
            for line in lines:
                self.states.enter(line)
            data = b"".join(write_json(line) + b"\n" for line in lines)
            self._file.write(data)
            self._file.flush()
            self._size += len(data)


class States:
    """The state of each prompt, computed from the lines of a ledger.

    Attributes:
        by_step: The prompts of each step that has some in flight, in the order in which the step took them.
        reasons: Number of prompts that were dropped, by reason.
    """

    def __init__(self) -> None:
        self.by_step: dict[int, list[int]] = {}
        self.reasons: Counter[str] = Counter()
        self._first = 0
        self._states = bytearray()  # by number of the prompt, from the first one on
        self._returned: set[int] = set()

    @property
    def end(self) -> int:
        """The number after that of the last prompt that was ever taken."""
        return self._first + len(self._states)

    @property
    def next(self) -> int:
        """The number of the next prompt that is taken."""
        return min(self._returned, default=self.end)

    def read(self, data: bytes, path: Path) -> None:
        """Enter all lines of ``data``, the content of ``path``. Raises CheckpointError if it is no ledger."""
        head, _, tail = data.partition(b"\n")
        entries = chain(read_lines(First, head, path), read_lines(Entry, tail, path, 2))
        for number, entry in enumerate(entries, 1):
            try:
                if isinstance(entry, DataError):
                    raise entry
                self.enter(cast("Mapping[str, Any]", entry))
            except (PodiumError, KeyError) as error:  # of a field that only some states have
                raise CheckpointError(f"{path}, line {number}: no entry of a ledger: {error}") from error

    def enter(self, line: Mapping[str, Any]) -> None:
        """Enter one line. Raises PodiumError if a prompt cannot become what the line says."""
        if "first" in line:
            self._first = line["first"]
            return
        state, prompts, step = _STATES.index(line["state"]), line["prompts"], line.get("step", -1)
        self._check(state, prompts, step)
        if state == _TAKEN:
            self._states += bytes(max(0, max(prompts, default=0) + 1 - self.end))
            self._returned.difference_update(prompts)
            self.by_step.setdefault(step, []).extend(prompts)
        for prompt in prompts:
            self._states[prompt - self._first] = state
        if state == _RETURNED:
            self._returned.update(prompts)
            self.by_step.clear()
        elif state >= _TRAINED and not self.in_flight([step]):
            self.by_step.pop(step, None)
        if state == _DROPPED:
            self.reasons[line["reason"]] += len(prompts)

    def _check(self, state: int, prompts: Sequence[int], step: int) -> None:
        """Raise PodiumError if the prompts of ``step`` cannot become ``state``. ``step`` is -1 where it is missing."""
        name, end = _STATES[state], self.end
        numbers = range(self._first, end + len(prompts) * (state == _TAKEN))
        if len({*prompts}) < len(prompts) or not all(prompt in numbers for prompt in prompts):
            raise PodiumError(f"ledger: {prompts} are no prompts that can become {name}")
        for prompt in prompts:
            own_state = self._states[prompt - self._first] if prompt < end else _RETURNED
            goes_on = own_state < state and own_state < _TRAINED
            if not goes_on and not (state == _RETURNED and _TAKEN <= own_state < _TRAINED):
                raise PodiumError(f"ledger: prompt {prompt} is {_STATES[own_state]} and cannot become {name}")
        if (step < 0) != (state == _RETURNED) or (state > _TAKEN and not {*prompts} <= {*self.by_step.get(step, ())}):
            raise PodiumError(f"ledger: step {step} has not taken all of {prompts}")

    def is_over(self, prompt: int) -> bool:
        """Whether a prompt is trained or dropped."""
        index = prompt - self._first
        return 0 <= index < len(self._states) and self._states[index] >= _TRAINED

    def open_before(self, until: int) -> list[int]:
        """Return the prompts before number ``until`` that are not taken."""
        return [*sorted(prompt for prompt in self._returned if prompt < until), *range(self.end, until)]

    def in_flight(self, steps: Iterable[int] | None = None, states: Sequence[str] = _IN_FLIGHT) -> list[int]:
        """Return the prompts that are taken, and neither trained nor dropped: those of ``steps``, in ``states``."""
        prompts = [prompt for step in self.by_step if steps is None or step in steps for prompt in self.by_step[step]]
        return [prompt for prompt in prompts if _STATES[self._states[prompt - self._first]] in states]

    def counts(self) -> dict[str, int]:
        """Return the number of prompts in each state, without the states that have none."""
        counts = {name: self._states.count(state) for state, name in enumerate(_STATES)}
        return {name: count for name, count in counts.items() if count}


def read_ledger(path: Path) -> States:
    """Read the ledger of a run that may be running. A last line that is not complete is skipped.

    Raises:
        CheckpointError: The file is no ledger.
        DataError: It is a link, or no regular file.
    """
    states, data = States(), RunFiles(path.parent).read(path.name)
    states.read(data[: data.rfind(b"\n") + 1], path)
    return states
