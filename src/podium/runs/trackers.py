"""The trackers that installed packages bring, by name."""

import inspect
from importlib.metadata import EntryPoint
from typing import Final

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import find_installed, load_installed, nearest
from podium.installed import list_entry_points
from podium.telemetry.sinks import Tracker

_KEY: Final = "run.trackers"
_GROUP: Final = "podium.trackers"


def find_tracker(name: str) -> EntryPoint | None:
    """Return the tracker that installed packages have for a name. Raises ConfigError where several have one."""
    return find_installed(_GROUP, name, _KEY)


def load_tracker(name: str) -> type[Tracker]:
    """Return the tracker that ``run.trackers`` names.

    Raises:
        ConfigError: It is not installed, cannot work here, or is no tracker.
    """
    if (entry := find_tracker(name)) is None:
        names = sorted(list_entry_points(group=_GROUP).names)
        listed = f"installed are {', '.join(names)}" if names else "none is installed"
        raise ConfigError(
            f"{_KEY} names {name!r}, and no tracker of this name is installed; {listed}{nearest(name, names, _GROUP)}; "
            f"{explain_packages(_GROUP, name)}"
        )
    tracker = load_installed(entry, _KEY)
    if not (inspect.isclass(tracker) and issubclass(tracker, Tracker)):
        raise ConfigError(f"{_KEY} names {name!r}: {entry.value} is no class of podium.telemetry.sinks.Tracker")
    tracker.check()
    return tracker
