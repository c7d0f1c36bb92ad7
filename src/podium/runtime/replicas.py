"""Independent copies of a worker, such as inference engines: each with a reservation and a life of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from podium.errors import ConfigError
from podium.runtime.call import Call
from podium.runtime.pool import ResourcePool

__all__ = ["Replicas"]

W = TypeVar("W")


class Replicas(Sequence[W], Generic[W]):
    """The handles of ``cluster.start_replicas``, in order: ``replicas[0].generate(prompts)``.

    A replica that dies takes no other with it: calls on it raise WorkerDied, those on the others go on, and
    ``restart(number)`` makes it anew in its own slots.
    """

    def __init__(self, handles: Sequence[W], release: Callable[[ResourcePool], None]) -> None:
        self._handles = tuple(handles)
        self._release = release

    @overload
    def __getitem__(self, at: int) -> W: ...
    @overload
    def __getitem__(self, at: slice) -> Replicas[W]: ...
    def __getitem__(self, at: int | slice) -> W | Replicas[W]:
        return Replicas(self._handles[at], self._release) if isinstance(at, slice) else self._handles[at]

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def alive(self) -> list[int]:
        """Numbers of the replicas that have lost no rank and are not broken."""
        hosts = [_group(handle).hosts for handle in self._handles]
        return [number for number, own in enumerate(hosts) if not own.dead and not own.broken]

    def restart(self, number: int) -> None:
        """Make one replica anew; the others go on. What WorkerGroup.restart raises."""
        if not 0 <= number < len(self):
            raise ConfigError(f"restart({number}): there are {len(self)} replicas, from 0")
        _group(self._handles[number]).restart()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Call[Any]]:
        """Call the endpoint ``method`` on every replica that is alive, with the same arguments; in order."""
        return [getattr(self._handles[number], method).submit(*args, **kwargs) for number in self.alive]

    def close(self) -> None:
        """End all of them and give their slots back. Idempotent."""
        for handle in self._handles:
            _group(handle).close()
            self._release(_group(handle).hosts.pool)


def _group(handle: Any) -> Any:
    return handle.group
