"""Typed events, and the sinks that show and store them.

    from podium.telemetry import active, emit, events, subscribe

    if active():                                   # on a hot path: build no event that nobody hears
        emit(events.Note("the moon is up"))

The sinks live in `podium.telemetry.sinks`, and the names of a step's metrics in `podium.telemetry.metrics`.
"""

from podium.telemetry import events
from podium.telemetry.bus import Bus, active, emit, flush, subscribe
from podium.telemetry.events import *  # noqa: F403 - exactly the names in its __all__, which are added below

__all__ = ["Bus", "active", "emit", "events", "flush", "subscribe"]
__all__ += events.__all__
