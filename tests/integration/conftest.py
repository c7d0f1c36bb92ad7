"""What integration tests share: clusters of real processes, whose fork server starts once, and finished runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

import podium
from podium import Cluster, Worker
from podium.trainer import PRELOAD
from tests.integration.finished_runs import read_only, share_folder


@pytest.fixture(scope="session")
def local() -> Iterator[Cluster]:
    """A local cluster that outlives the failures of its groups. A test closes the groups that it starts."""
    with podium.connect("local") as cluster:
        cluster.start(Worker.bind()).group.close()  # the fork server is warm once a first process has started
        yield cluster


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Cluster]:
    """A local cluster for training: its fork server has imported what a run needs, which takes a run seconds.

    That includes what each worker of sessions would import by itself.
    """
    for_sessions = [name for name in ("openai", "renderers", "uvicorn", "starlette") if find_spec(name)]
    with podium.connect("local", preload=[*PRELOAD, *for_sessions]) as cluster:
        yield cluster


@pytest.fixture
def finished_grpo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run of GRPO, which nobody may change: ``runs/run``, and ``logits-STEP.pt``."""
    with read_only(share_folder(tmp_path_factory, "grpo")) as folder:
        yield folder


@pytest.fixture
def finished_lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with adapters upon the model in the folder ``base``."""
    with read_only(share_folder(tmp_path_factory, "lora")) as folder:
        yield folder


@pytest.fixture
def finished_sft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run of supervised fine-tuning, which nobody may change."""
    with read_only(share_folder(tmp_path_factory, "sft")) as folder:
        yield folder


@pytest.fixture
def finished_sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run with sessions of two turns, which nobody may change."""
    with read_only(share_folder(tmp_path_factory, "sessions")) as folder:
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_picture() -> Iterator[None]:
    """Draw the learning curve of the first run, whose picture all others get: it takes a fourth of a small run."""
    try:
        from podium_curves import plot_curve
    except ImportError:  # it is not installed, or a library that it needs
        yield
        return
    pictures: list[bytes] = []

    def plot_once(curve: Any, file: IO[bytes], title: str = "") -> None:
        if not pictures:
            plot_curve(curve, picture := io.BytesIO(), title)
            pictures.append(picture.getvalue())
        file.write(pictures[0])

    with mock.patch("podium_curves.plot_curve", plot_once):
        yield
