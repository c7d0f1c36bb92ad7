"""One HTML file that holds runs, for a mail, a report or an archive."""

import base64
import gzip
from collections.abc import Sequence
from typing import Any, Final

from podium.errors import DataError
from podium_view.page import page
from podium_view.run import Run
from podium_view.server import encode_answer

__all__ = ["export_page"]

_STEPS: Final = 10  # steps of each run whose completions and slices are in the file
_MOST_BYTES: Final = 64 << 20  # bytes of the answers before they are compressed


def export_page(runs: Sequence[Run]) -> str:
    """Return the page with its answers inside. Curves, settings and failures are whole.

    Completions are those of ten steps, and of the first and the last evaluation. The ten are the first, the last, and
    others at equal distances. The page says so if a run has more.
    """
    answers: dict[str, Any] = {"runs": [run.answer("about") for run in runs]}
    budget = _Budget(answers)
    left_out = False
    for number, run in enumerate(runs):
        for name in ("curves", "failures", "timeline", "settings", "evaluations"):
            budget.add(f"{number}/{name}", run, name)
        chosen = _spread(run.answer("steps"))
        left_out |= len(chosen) < len(run.answer("steps"))
        included = [step for step in chosen if _add_step(budget, number, run, step)]
        left_out |= len(included) < len(chosen)
        answers[f"{number}/steps"] = included
        left_out |= _add_evaluations(budget, number, run)
        left_out |= _add_slices(budget, number, run)
    packed = base64.b64encode(gzip.compress(encode_answer(answers), 6, mtime=0)).decode()
    most = f"{_STEPS} steps and two evaluations of each run"
    note = f"This file holds the completions of {most} at most; the run's directory has all."
    return page(", ".join(run.name for run in runs) + " · podium view", packed, note if left_out else "")


class _Budget:
    """Adds answers as long as a browser can open all of them at once."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers
        self._left = _MOST_BYTES

    def add(self, key: str, run: Run, path: str) -> bool:
        """Add an answer, or the error of a file that cannot be read, which the page shows in its place. Return whether
        there was room."""
        if self._left <= 0:
            return False
        try:
            self._answers[key] = run.answer(path)
        except DataError as error:
            self._answers[key] = {"error": str(error)}
        self._left -= len(encode_answer(self._answers[key]))
        return True

    def read(self, key: str, name: str) -> list[Any]:
        """Return the list ``name`` of an answer that was added; an empty one of an error."""
        return self._answers[key].get(name, [])


def _add_step(budget: _Budget, number: int, run: Run, step: int) -> bool:
    if not budget.add(f"{number}/groups/{step}", run, f"groups/{step}"):
        return False
    for group in budget.read(f"{number}/groups/{step}", "groups"):
        path = f"group/{step}/{group['group']}/0"
        if not budget.add(f"{number}/{path}", run, path):
            return False
    return True


def _add_evaluations(budget: _Budget, number: int, run: Run) -> bool:
    """Add the first and the last evaluation of each set, which are compared. Return whether some were left out."""
    left_out = False
    for place, entry in enumerate(run.answer("evaluations")):
        left_out |= len(entry["steps"]) > 2
        for step in dict.fromkeys((entry["steps"][0], entry["steps"][-1])):
            path = f"{place}/{step}"
            if budget.add(f"{number}/evaluation/{path}", run, f"evaluation/{path}"):
                for row in range(len(budget.read(f"{number}/evaluation/{path}", "rows"))):
                    left_out |= not budget.add(f"{number}/evaluated/{path}/{row}", run, f"evaluated/{path}/{row}")
    return left_out


def _add_slices(budget: _Budget, number: int, run: Run) -> bool:
    """Add slices of each trace. Return whether some were left out."""
    try:
        names = run.answer("timeline")["traces"]
    except DataError:
        return False
    left_out = False
    for index in range(len(names)):
        budget.add(f"{number}/timeline/{index}", run, f"timeline/{index}")
        count = len(run.answer(f"timeline/{index}")["steps"])
        chosen = _spread(list(range(count + 1)))
        left_out |= len(chosen) < count + 1
        for step in chosen:
            path = f"slices/{index}/{step}/{step}"
            budget.add(f"{number}/{path}", run, path)
    return left_out


def _spread(steps: list[int]) -> list[int]:
    """At most ten of ``steps``: the first, the last, and others at equal distances."""
    if len(steps) <= _STEPS:
        return steps
    return [steps[round(index * (len(steps) - 1) / (_STEPS - 1))] for index in range(_STEPS)]
