"""What a run holds open from its first moment to its last: directory, cluster, terminal, sinks, and signals."""

from __future__ import annotations

import datetime
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console

from podium.config import config_to_dict
from podium.errors import ConfigError
from podium.runtime import Cluster, connect
from podium.telemetry import Note, emit
from podium.telemetry.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink, TraceSink, TrackioSink, WandbSink
from podium.telemetry.sinks.console import terminal
from podium.trainer.checkpoints import Checkpoint
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.run_dir import RunDirectory

__all__ = ["ECHO_S", "PRELOAD", "Session", "StopRequest", "listen_for_stop", "open_session"]

PRELOAD: Final = (
    *("torch", "transformers", "podium.workers.policy", "podium.workers.reference", "podium.workers.critic"),
    *("podium.workers.estimator", "podium.workers.generator"),
)
"""What worker processes import before their workers are made; local's fork server does it once for all."""

ECHO_S: Final = 1.0
"""A signal so soon after the first is the same one: ``make`` and ``timeout`` pass it on to processes that had it."""


class StopRequest:
    """Whether somebody asked the run to end. ``request()`` does what a first signal does."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = 0.0

    def request(self, reason: str = "asked to stop") -> None:
        """End the run after the step that is running, with a checkpoint."""
        self.requested = True
        self.requested_at = time.monotonic()
        emit(Note(f"{reason}: finishing this step, then saving; once more stops now"))


@dataclass(frozen=True)
class Session:
    """An open run.

    Attributes:
        checkpoint: The checkpoint from which the run goes on; None at its beginning.
        console: The terminal that shows the run; None where nothing is shown.
    """

    directory: RunDirectory
    cluster: Cluster
    stop: StopRequest
    checkpoint: Checkpoint | None
    console: Console | None


@contextmanager
def open_session(
    config: PPOConfig | SFTConfig,
    recipe: str,
    cluster: Cluster | str,
    *,
    backend_options: Mapping[str, Any] | None = None,
    show: bool,
) -> Iterator[Session]:
    """Open everything that a run needs, and close it in the reverse order, whatever happens.

    Args:
        cluster: A connected cluster, which stays open, or a backend's name, connected here with its logs in the run.
        backend_options: Options of :func:`podium.connect`, where ``cluster`` is a name.
        show: Whether progress, events and log records are shown on the terminal.

    Raises:
        ConfigError: The directory is another run's, a tracker is not installed, there is no such backend, or it knows
            no such option.
    """
    if backend_options and not isinstance(cluster, str):
        raise ConfigError(f"backend_options = {dict(backend_options)}: {cluster!r} is connected already")
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory(_path(config, recipe), resume=bool(config.run.resume)))
        checkpoint = directory.checkpoints.latest() if config.run.resume else None
        if config.run.resume:
            # Before a sink opens the files that this cuts.
            directory.rewind(0 if checkpoint is None else checkpoint.step)
        stack.enter_context(directory.controller_log())
        console = terminal() if show else None
        for sink in _sinks(config, directory, console):
            stack.enter_context(sink)
        if isinstance(cluster, str):
            hints = {"log_dir": directory.logs.absolute(), "preload": PRELOAD}
            cluster = stack.enter_context(connect(cluster, hints=hints, **(backend_options or {})))
        yield Session(directory, cluster, stack.enter_context(listen_for_stop()), checkpoint, console)


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Listen for Ctrl-C and SIGTERM during the block, then put the former handlers back.

    The first signal requests a stop, the second raises KeyboardInterrupt in the main thread. Python delivers signals to
    the main thread only; in any other this listens to nothing, and ``request()`` is the way to stop.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if not stop.requested:
            stop.request(signal.Signals(number).name)
        elif time.monotonic() - stop.requested_at > ECHO_S:
            raise KeyboardInterrupt

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _path(config: PPOConfig | SFTConfig, recipe: str) -> Path:
    if config.run.resume:
        return Path(config.run.resume)
    if config.run.name:
        return Path(config.run.dir) / config.run.name
    stamp = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{recipe}"
    taken = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
    return next(path for name in taken if not (path := Path(config.run.dir) / name).exists())


def _sinks(config: PPOConfig | SFTConfig, directory: RunDirectory, console: Console | None) -> Iterator[Sink]:
    yield JsonlSink(directory.metrics_path)
    yield TraceSink(directory.trace_path)
    if console is not None:
        yield ConsoleSink(console=console)
    name = directory.path.name
    for tracker in config.run.trackers:
        match tracker:
            case "tensorboard":
                yield TensorBoardSink(directory.path / "tensorboard")
            case "wandb":
                yield WandbSink("podium", name=name, config=config_to_dict(config), folder=directory.path)
            case "trackio":
                yield TrackioSink("podium", name=name, config=config_to_dict(config))
