"""What a suite is given: how thorough to be, where logs go, which peers there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.peer import python_of


@dataclass(kw_only=True)
class Context:
    """One run of the bench."""

    quick: bool
    logs: Path
    say: Callable[[str], None]
    absent: set[str] = field(default_factory=set[str])

    def repetitions(self, thorough: int, quick: int = 3) -> int:
        return quick if self.quick else thorough

    def peer_python(self, peer: str) -> Path | None:
        """The interpreter of a peer's environment; a peer that is missing is noted, and left out."""
        python = python_of(peer)
        if python is None:
            self.absent.add(peer)
        return python

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"
