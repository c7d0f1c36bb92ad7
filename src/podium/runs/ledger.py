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

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

from podium.errors import CheckpointError, PodiumError
from podium.runs.reading import RunFiles

__all__ = ["Ledger", "States", "read_ledger"]

_STATES: Final = ("returned", "taken", "rolled_out", "graded", "trained", "dropped")
_RETURNED, _TAKEN, _, _, _TRAINED, _DROPPED = range(len(_STATES))


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
        self.states = States()
        self._lock = Lock()  # the two halves of steps may run at the same time
        data = path.read_bytes()[:size] if size and path.exists() else b""
        if len(data) < size:
            raise CheckpointError(
                f"{path} has {len(data)} bytes, and had {size} when the checkpoint was made: put the run's own file "
                "back"
            )
        self.states.read(data, path)
        self._file = path.open("ab")
        self._file.truncate(len(data))
        self._size = len(data)
        if not data:
            self._write({"first": first})
        if in_flight := self.states.in_flight():
            self._write({"state": "returned", "prompts": in_flight})
        if self.states.next != first:
            self._file.close()
            raise CheckpointError(
                f"{path} goes on at prompt {self.states.next}, and the checkpoint at prompt {first}: put the run's own "
                "file back"
            )

    def take(self, step: int, until: int) -> None:
        """Enter as taken for ``step`` all prompts with numbers below ``until`` that have no entry yet."""
        if prompts := self.states.open_before(until):
            self._write({"state": "taken", "step": step, "prompts": prompts})

    def move(self, step: int, state: str, places: Iterable[int] | None = None, **more: Any) -> None:
        """Enter the next state of the prompts of ``step``, if the step has prompts. ``more`` are further fields of the
        entry.

        Args:
            places: Which of the prompts, by their place in the step; None for all of them.

        Raises:
            PodiumError: A prompt is in that state already, or in a later one.
        """
        if prompts := self.states.by_step.get(step):
            prompts = prompts if places is None else [prompts[index] for index in places]
            self._write({"state": state, "step": step, "prompts": prompts, **more})

    def drop(self, reason: str) -> None:
        """Enter that all prompts in flight are dropped."""
        for step in list(self.states.by_step):
            self.move(step, "dropped", reason=reason)

    def sync(self) -> int:
        """Return the length of the file, once all of it is on the disk."""
        with self._lock:
            os.fsync(self._file.fileno())
            return self._size

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with suppress(OSError):  # a write failed before, and its error was raised there
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self.states.enter(line)
            data = json.dumps(line).encode() + b"\n"
            self._file.write(data)
            self._file.flush()
            self._size += len(data)


class States:
    """The state of each prompt, computed from the lines of a ledger.

    Attributes:
        by_step: The prompts in flight, by step.
        reasons: Number of prompts that were dropped, by reason.
    """

    def __init__(self) -> None:
        self.by_step: dict[int, list[int]] = {}
        self.reasons: Counter[str] = Counter()
        self._first = 0
        self._states = bytearray()  # by number of the prompt, from the first one on
        self._returned: set[int] = set()

    @property
    def next(self) -> int:
        """The number of the next prompt that is taken."""
        return min(self._returned, default=self._first + len(self._states))

    def read(self, data: bytes, path: Path) -> None:
        """Enter all lines of ``data``, the content of ``path``. Raises CheckpointError if it is no ledger."""
        for number, line in enumerate(data.splitlines(), 1):
            try:
                self.enter(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, PodiumError) as error:
                raise CheckpointError(f"{path}, line {number}: no entry of a ledger: {error}") from error

    def enter(self, line: Mapping[str, Any]) -> None:
        """Enter one line. Raises PodiumError if a prompt cannot become what the line says."""
        if "first" in line:
            self._first = int(line["first"])
            return
        state, prompts = _STATES.index(line["state"]), [int(prompt) for prompt in line["prompts"]]
        end = self._first + len(self._states)
        for prompt in prompts:
            own_state = self._states[prompt - self._first] if prompt < end else _RETURNED
            goes_on = own_state < state and own_state < _TRAINED
            if not goes_on and not (state == _RETURNED and _TAKEN <= own_state < _TRAINED):
                raise PodiumError(f"ledger: prompt {prompt} is {_STATES[own_state]} and cannot become {line['state']}")
        if state == _TAKEN:
            self._states += bytes(max(0, max(prompts, default=0) + 1 - end))
            self._returned.difference_update(prompts)
            self.by_step.setdefault(line["step"], []).extend(prompts)
        for prompt in prompts:
            self._states[prompt - self._first] = state
        if state == _RETURNED:
            self._returned.update(prompts)
            self.by_step.clear()
        elif state >= _TRAINED:
            left = [prompt for prompt in self.by_step.pop(line["step"]) if prompt not in {*prompts}]
            if left:  # some of the step's prompts were dropped alone
                self.by_step[line["step"]] = left
        if state == _DROPPED:
            self.reasons[line["reason"]] += len(prompts)

    def open_before(self, until: int) -> list[int]:
        """Return the prompts before number ``until`` that are not taken."""
        end = self._first + len(self._states)
        return [*sorted(prompt for prompt in self._returned if prompt < until), *range(end, until)]

    def in_flight(self) -> list[int]:
        """Return the prompts that are taken, and neither trained nor dropped."""
        return [prompt for prompts in self.by_step.values() for prompt in prompts]

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
    with RunFiles(path.parent).open(path.name) as file:
        states, data = States(), file.read()
    states.read(data[: data.rfind(b"\n") + 1], path)
    return states
