"""The contract of trackers that packages register, and the facts of a run that they get."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from podium.telemetry.sinks.base import Sink


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker gets of a run.

    Attributes:
        name: The name of the run's directory.
        path: The run's directory.
        config: The run's configuration, nested, with its secrets: :func:`podium.secrecy.mask` hides them.
        options: The options of ``run.trackers`` by name: project, entity, group and tags.
        is_resumed: Whether the run has begun before.
        make_folder: It makes a directory of this name in the run's directory.
        read_id: It returns an id of the run, which stays the same when the run is resumed.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    is_resumed: bool
    make_folder: Callable[[str], Path]
    read_id: Callable[[], str]


class Tracker(Sink):
    """A sink that ``run.trackers`` names. A package has it in the entry point group ``podium.trackers``."""

    @classmethod
    def check(cls) -> None:
        """Check that the tracker can work here, before a run starts. Raises ConfigError with the remedy."""

    @classmethod
    @abstractmethod
    def of_run(cls, run: TrackedRun) -> Self:
        """Make the tracker of a run. Raises ConfigError."""
