"""Limits how often a run continues after the loss of a worker process, and describes the losses.

a generator with processes of its own   it is restarted and gets the current weights (podium.trainer.generators)
any other worker                        all workers are closed, and the run is resumed from its latest checkpoint
the process that hands out grades       the same; the grader starts another one

A process that ends while a loss is mended is one more loss: a replacement that starts, loads the checkpoint or gets its
weights, or any other process of the run.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from podium.errors import LostTooOften, PodiumError

WINDOW_S: Final = 3600.0


class RunLost(Exception):
    """A run has lost a worker, and with it all that was learned since the latest checkpoint."""


def find_lost(error: BaseException) -> list[str]:
    """Return the process whose end caused ``error``, if one did: an empty list means that none has ended."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PodiumError) and cause.lost:
            return [cause.lost]
        cause = cause.__cause__
    return []


class LostWorkers:
    """The workers that a run has lost, and the prompts that may have ended them.

    Args:
        most: The run goes on after this many losses within an hour. Each generator has the same limit of its own.
        remedies: What a person can do where the prompts of a role end its process, by role.

    Attributes:
        suspects: Why a prompt is not played again, by the number of the prompt.
    """

    def __init__(self, most: int, remedies: Mapping[str, str] | None = None) -> None:
        self.suspects: dict[int, str] = {}
        self._most, self._remedies = most, remedies or {}
        self._found: dict[str, list[tuple[float, str]]] = {}
        self._in_flight: dict[str, set[int]] = {}  # by role, the prompts with which it was lost once

    @property
    def any(self) -> bool:
        """Whether the run has lost a worker."""
        return bool(self._found)

    def suspect(self, role: str, prompts: Iterable[int]) -> str:
        """Note the prompts that were in flight when a process with ``role`` was lost.

        Those for which this is the second time become suspects. Returns a sentence about them; "" if there are none.
        """
        prompts, before = {*prompts}, self._in_flight.setdefault(role, set())
        twice = sorted(prompts & before - self.suspects.keys())
        before |= prompts
        if not twice:
            return ""
        reason = f"in flight in two losses of {role}"
        self.suspects |= dict.fromkeys(twice, reason)
        numbers = ", ".join(map(str, twice[:8])) + (", …" if len(twice) > 8 else "")
        what = f"prompt{'s' * (len(twice) > 1)} {numbers} {'were' if len(twice) > 1 else 'was'} {reason}"
        return f"{what}, and will not be played again{self._remedy(role)}"

    def acquit(self, prompts: Iterable[int], *roles: str) -> None:
        """Note that processes with ``roles`` have lived through these prompts."""
        for role in roles:
            self._in_flight.get(role, set()).difference_update(prompts)

    def _remedy(self, causes: str) -> str:
        """Return the remedies for the roles that ``causes`` name."""
        roles = set(re.findall(r"\w+", causes))
        return "".join(f". {remedy}" for role, remedy in self._remedies.items() if role in roles)

    def add(self, causes: Sequence[str], error: PodiumError, of: str = "") -> str:
        """Count a loss that caused ``error``. Returns the cause with the number of the loss.

        Generators that are restarted alone are counted separately, each under its name ``of``.

        Raises:
            LostTooOften: The run has lost too many workers. The message lists the losses, the first one first.
            PodiumError: ``error`` itself, if the run must not continue after any loss.
        """
        now, cause = time.monotonic(), "; ".join(causes)
        losses = [(at, cause) for at, cause in self._found.get(of, ()) if now - at < WINDOW_S]
        losses.append((now, cause))
        self._found[of] = losses
        if self._most == 0:
            raise error
        if len(losses) > self._most:
            lines = [f"  {now - at:.0f} s ago: {cause}" for at, cause in losses]
            raise LostTooOften(
                f"the run lost workers {len(losses)} times within an hour, and run.max_restarts = {self._most}:\n"
                + "\n".join(lines)
                + "\nThe last of these losses caused this error: "
                + str(error)
                + self._remedy(" ".join(cause for _, cause in losses))
            ) from error
        return f"lost {cause} (loss {len(losses)} of at most {self._most} within an hour)"
