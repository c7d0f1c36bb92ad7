"""Independent copies of a worker, such as inference engines, which are placed and restarted one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from podium.errors import ConfigError
from podium.runtime.calls import Call
from podium.runtime.pool import ResourcePool

__all__ = ["Replicas"]

W = TypeVar("W")


class Replicas(Sequence[W], Generic[W]):
    """The handles of ``cluster.start_replicas``, in order: ``replicas[0].generate(prompts)``.

    Where a replica has lost a process, calls on it raise WorkerDied until ``restart(number)``, and the other replicas
    work on.
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
        processes = [_group(handle).processes for handle in self._handles]
        return [number for number, own in enumerate(processes) if not own.calls.lost and not own.calls.broken]

    def restart(self, number: int) -> None:
        """Restart one replica. Raises what WorkerGroup.restart raises."""
        if not 0 <= number < len(self):
            raise ConfigError(f"restart({number}): there are {len(self)} replicas, from 0")
        _group(self._handles[number]).restart()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Call[Any]]:
        """Submit a call of the endpoint ``method`` to every replica that is alive, with the same arguments."""
        return [getattr(self._handles[number], method).submit(*args, **kwargs) for number in self.alive]

    def close(self) -> None:
        """Close all replicas and release their slots. Idempotent."""
        for handle in self._handles:
            _group(handle).close()
            self._release(_group(handle).processes.pool)


def _group(handle: Any) -> Any:
    return handle.group
