"""The sinks that show and store events. Each is used as ``with Sink(...):`` or through ``attach()`` and ``close()``.

The names are looked up on first use, so that importing this package does not import rich.
"""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.telemetry.sinks.base import Sink as Sink
    from podium.telemetry.sinks.console import ConsoleSink as ConsoleSink
    from podium.telemetry.sinks.jsonl import JsonlSink as JsonlSink
    from podium.telemetry.sinks.trace import TraceSink as TraceSink
    from podium.telemetry.sinks.trackers import TrackedRun as TrackedRun, Tracker as Tracker
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
