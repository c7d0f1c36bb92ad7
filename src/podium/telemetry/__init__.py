"""Typed events and where they go: emitted below, shown above.

    from podium.telemetry import active, emit, events, subscribe

    if active():                                   # on a hot path: build no event that nobody hears
        emit(events.Note("the moon is up"))

The sinks live in `podium.telemetry.sinks`, the names of a step's metrics in `podium.telemetry.metrics`.
"""

from podium.telemetry import events
from podium.telemetry.bus import Bus, active, emit, subscribe
from podium.telemetry.events import (
    CallFinished,
    CheckpointSaved,
    CompletionsSampled,
    EvalFinished,
    Event,
    Note,
    PhaseStarted,
    Sample,
    StageFinished,
    Stalled,
    StepFinished,
    WorkerLost,
    WorkerStarted,
)

__all__ = [
    "Bus",
    "CallFinished",
    "CheckpointSaved",
    "CompletionsSampled",
    "EvalFinished",
    "Event",
    "Note",
    "PhaseStarted",
    "Sample",
    "StageFinished",
    "Stalled",
    "StepFinished",
    "WorkerLost",
    "WorkerStarted",
    "active",
    "emit",
    "events",
    "subscribe",
]
