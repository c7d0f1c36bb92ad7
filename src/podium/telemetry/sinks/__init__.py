"""The sinks that show and store events. Each is used as ``with Sink(...):`` or through ``attach()`` and ``close()``.

The names are looked up on first use, so that importing this package imports neither rich nor a tracker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.telemetry.sinks.base import Sink
    from podium.telemetry.sinks.console import ConsoleSink
    from podium.telemetry.sinks.jsonl import JsonlSink
    from podium.telemetry.sinks.trace import TraceSink
    from podium.telemetry.sinks.trackers import TensorBoardSink, TrackioSink, WandbSink

__all__ = ["ConsoleSink", "JsonlSink", "Sink", "TensorBoardSink", "TraceSink", "TrackioSink", "WandbSink"]

_HOMES = {
    "ConsoleSink": "console",
    "JsonlSink": "jsonl",
    "Sink": "base",
    "TensorBoardSink": "trackers",
    "TraceSink": "trace",
    "TrackioSink": "trackers",
    "WandbSink": "trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
