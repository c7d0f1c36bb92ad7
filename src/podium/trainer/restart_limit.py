"""Limits how often a run continues after the loss of a worker process, and describes the losses.

a generator with processes of its own   it is restarted and gets the current weights (podium.trainer.generators)
any other worker                        all workers are closed, and the run is resumed from its latest checkpoint
"""

import time
from collections.abc import Sequence
from typing import Final

from podium.errors import LostTooOften, PodiumError

__all__ = ["Losses", "RunLost"]

WINDOW_S: Final = 3600.0


class RunLost(Exception):
    """A run has lost a worker, and with it all that was learned since the latest checkpoint."""


class Losses:
    """The workers that a run has lost.

    Args:
        most: The run goes on after this many losses within an hour. Each generator has the same limit of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[str, list[tuple[float, str]]] = {}

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
            ) from error
        return f"lost {cause} (loss {len(losses)} of at most {self._most} within an hour)"
