"""How often a run goes on after it has lost a worker process, and what it says of that.

a generator with processes of its own   it is restarted, gets the current weights, and draws again what it had begun
any other worker                        all workers are closed, and the run is resumed from its latest checkpoint
"""

import time
from collections.abc import Sequence
from typing import Final

from podium.errors import PodiumError

__all__ = ["Losses", "RunLost"]

WINDOW_S: Final = 3600.0


class RunLost(Exception):
    """A run has lost a worker that holds what it has learned since the latest checkpoint."""


class Losses:
    """The workers that a run has lost.

    Args:
        most: The run goes on after this many losses within an hour.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: list[tuple[float, str]] = []

    def add(self, causes: Sequence[str], error: PodiumError) -> str:
        """Count a loss, which showed as ``error``. Returns the cause with the number of the loss.

        Raises:
            PodiumError: There were too many. The message lists them, the first one first. It is ``error`` itself where
                the run was not to go on at all.
        """
        now, cause = time.monotonic(), "; ".join(causes)
        self._found = [(at, known) for at, known in self._found if now - at < WINDOW_S]
        self._found.append((now, cause))
        if self._most == 0:
            raise error
        if len(self._found) > self._most:
            lines = [f"  {now - at:.0f} s ago: {known}" for at, known in self._found]
            raise PodiumError(
                f"the run lost workers {len(self._found)} times within an hour, and run.max_restarts = {self._most}:\n"
                + "\n".join(lines)
                + "\nThe latest error follows from the last of them: "
                + str(error)
            ) from error
        return f"lost {cause} (loss {len(self._found)} of at most {self._most} within an hour)"
