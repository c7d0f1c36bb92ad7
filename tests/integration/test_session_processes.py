"""Sessions in processes of their own: the same training, and an end to whatever does not end by itself."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.errors import PodiumError
from podium.processes import children_of
from podium.rollout.environments import EnvironmentConfig
from podium.runtime import Cluster
from podium.telemetry import metrics
from podium.trainer import PPOConfig
from podium_agents import Client
from podium_agents.environments.processes import SessionProcesses
from podium_agents.environments.session_process import DistantClient
from tests.integration.test_environments import WORLDS, config_of, told
from tests.integration.training import losses, metrics_rows, train
from tests.waits import all_end, wait_until


@pytest.mark.everyday("agent")
@pytest.mark.parametrize(
    "world",
    ("twice", "agent", "debate", "endless", "tools"),
)
def test_the_same_is_trained_as_in_the_workers_process(world: str, tmp_path: Path) -> None:
    # Each session of an agent imports its client anew.
    few: dict[str, Any] = {}
    if world == "agent":
        few = {"run": {"steps": 1}, "batch": {"prompts": 2}, "sampling": {"n": 2}, "eval": {"items": 0}}
    here, apart = (
        train(config_of(world, tmp_path / str(processes), options={"processes": processes}, **few))
        for processes in (0, 2)
    )
    assert losses(here) == losses(apart)
    for one, other in zip(metrics_rows(here), metrics_rows(apart), strict=True):
        own = {name for name in one if name.startswith(("sessions/", "reward/")) and "seconds" not in name}
        own -= {metrics.SESSIONS_REUSED, metrics.SESSIONS_EVICTED}  # which depend on what is drawn at the same time
        assert {name: one[name] for name in own} == {name: other[name] for name in own}


def test_worlds_of_reset_and_step_live_there_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": {"train": ""}, "algorithm": {"advantage": "gae_turns"}}
    here, apart = (
        train(config_of("Guess", tmp_path / str(processes), PPOConfig, options={"processes": processes}, **options))
        for processes in (0, 2)
    )
    assert losses(here) == losses(apart)


def test_what_never_ends_is_killed_with_all_that_it_started(tmp_path: Path, preloaded: Cluster) -> None:
    """Some sessions compute in C with the interpreter's lock, some end their process, some leave another behind."""
    options = {"time_limit_s": 5.0, "processes": 4}
    with told() as notes:
        few: dict[str, Any] = {"run": {"steps": 1}, "eval": {"items": 0}}
        run = train(config_of("stubborn", tmp_path, options=options, batch={"prompts": 12}, **few), preloaded)
    said = "\n".join(notes)
    for reason in ("time limit", "its process ended (exit code 3)", "ValueError: a process is left"):
        assert reason in said, said
    assert all(0 < row[metrics.SESSIONS_FAILED] < 1 for row in metrics_rows(run))
    assert wait_until(lambda: not processes_of(b"sleep\x00987654"))
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    assert {int(answer) % 5 for answer in table["expected"]} <= {0, 4}
    rewards = table["reward"]
    assert len({*rewards}) > 0.9 * len(rewards), "forks drew the same random numbers"


def test_a_call_that_nobody_waits_for_is_taken_back(tmp_path: Path) -> None:
    run = train(config_of("impatient", tmp_path, options={"processes": 2}))
    assert [row[metrics.SESSIONS_FAILED] for row in metrics_rows(run)] == [0.0, 0.0]


def processes_of(command: bytes) -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and command in _command_of(entry)
    ]


def _command_of(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


class Nobody:
    """A client of a session without a model."""

    seed, model, session_id, api_key, base_url, turns = 1, "none", "s", "", "", 0

    def __init__(self) -> None:
        from collections import Counter

        self.counts = Counter[str]()


def test_the_process_of_the_environment_is_started_again() -> None:
    processes = SessionProcesses(EnvironmentConfig(name=f"{WORLDS}:pid"))
    before = {*children_of(os.getpid())}

    async def sessions() -> list[float | None]:
        found: list[float | None] = []
        for _ in range(2):
            ending = await processes.play({}, Nobody())  # type: ignore[arg-type]
            found.append(ending.outcome.score)
        return found

    try:
        first, second = asyncio.run(sessions())
        assert first != second, "a session is not alone in its process"
        (own,) = {*children_of(os.getpid())} - before
        os.kill(own, signal.SIGKILL)
        assert all_end([own])
        assert len(asyncio.run(sessions())) == 2
    finally:
        processes.close()
    assert {*children_of(os.getpid())} == before


def test_an_environment_that_cannot_be_loaded_there_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = tmp_path / "world.py"
    world.write_text(
        "import os\nif 'NOT_HERE' in os.environ: raise OSError('no license')\n\nasync def play(task, client): ...\n"
    )
    monkeypatch.setenv("NOT_HERE", "1")
    processes = SessionProcesses(EnvironmentConfig(name=f"{world}:play"))
    with pytest.raises(PodiumError, match=r"in a process of its own: .*no license"):
        processes.start()


KEEPERS = ("close", "end_calls", "waited_s")  # for whoever keeps the session, and not for what lives it


def test_clients_there_can_do_what_clients_can() -> None:
    def public(cls: type) -> dict[str, Any]:
        return {name: one for name, one in vars(cls).items() if not name.startswith("_") and name not in KEEPERS}

    here, there = public(Client), public(DistantClient)
    kept = {"model", "session_id"}  # plain attributes there
    assert {*here} - kept == {*there}
    for name, one in here.items():
        if inspect.isfunction(one):
            own = inspect.signature(there[name])
            assert [*inspect.signature(one).parameters.values()] == [*own.parameters.values()], name
