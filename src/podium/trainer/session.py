"""What a run holds open from its first moment to its last: directory, cluster, sinks, and an ear for signals."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.runtime import Cluster, connect
from podium.telemetry.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink, TraceSink, TrackioSink, WandbSink
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.interrupt import StopRequest, listen_for_stop
from podium.trainer.loading import config_to_dict
from podium.trainer.run_dir import Checkpoint, RunDirectory

__all__ = ["PRELOAD", "Session", "open_session", "run_config_path"]

PRELOAD = ("torch", "transformers", "podium.workers")
"""What hosts import before their workers are made; local's fork server does it once for all."""


@dataclass(frozen=True)
class Session:
    """An open run. ``checkpoint`` is where it goes on from; None at its beginning."""

    directory: RunDirectory
    cluster: Cluster
    stop: StopRequest
    checkpoint: Checkpoint | None


@contextmanager
def open_session(
    config: PPOConfig | SFTConfig,
    recipe: str,
    cluster: Cluster | str,
    *,
    backend_options: Mapping[str, Any] | None = None,
    show: bool,
) -> Iterator[Session]:
    """Open everything a run needs, and close it in the reverse order, whatever happens.

    Args:
        cluster: a connected one, which stays open, or a backend's name, connected here with its logs in the run.
        backend_options: of :func:`podium.connect`, where ``cluster`` is a name.
        show: progress, events and log records on the terminal.

    Raises:
        ConfigError: the directory is another run's, a tracker is not installed, there is no such backend, or it knows
            no such option.
    """
    if backend_options and not isinstance(cluster, str):
        raise ConfigError(f"backend_options = {dict(backend_options)}: {cluster!r} is connected already")
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory(_path(config, recipe), resume=bool(config.run.resume)))
        checkpoint = directory.latest_checkpoint() if config.run.resume else None
        if config.run.resume:
            # Before a sink opens the files that this cuts.
            directory.rewind(0 if checkpoint is None else checkpoint.step)
        stack.enter_context(directory.controller_log())
        for sink in _sinks(config, directory, show=show):
            stack.enter_context(sink)
        if isinstance(cluster, str):
            hints = {"log_dir": directory.logs.absolute(), "preload": PRELOAD}
            cluster = stack.enter_context(connect(cluster, hints=hints, **(backend_options or {})))
        yield Session(directory, cluster, stack.enter_context(listen_for_stop()), checkpoint)


def run_config_path(run: str) -> Path:
    """The configuration of the run in directory ``run``. Raises ConfigError if there is none."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"no run at {run}: it has no config.yaml; give the directory of a run, such as runs/NAME")
    return path


def _path(config: PPOConfig | SFTConfig, recipe: str) -> Path:
    if config.run.resume:
        return Path(config.run.resume)
    if config.run.name:
        return Path(config.run.dir) / config.run.name
    stamp = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{recipe}"
    taken = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
    return next(path for name in taken if not (path := Path(config.run.dir) / name).exists())


def _sinks(config: PPOConfig | SFTConfig, directory: RunDirectory, *, show: bool) -> Iterator[Sink]:
    yield JsonlSink(directory.metrics_path)
    yield TraceSink(directory.trace_path)
    if show:
        yield ConsoleSink()
    name = directory.path.name
    for tracker in config.run.trackers:
        match tracker:
            case "tensorboard":
                yield TensorBoardSink(directory.path / "tensorboard")
            case "wandb":
                yield WandbSink("podium", name=name, config=config_to_dict(config), folder=directory.path)
            case "trackio":
                yield TrackioSink("podium", name=name, config=config_to_dict(config))
