"""Environments behind a server of OpenEnv. A test that starts one needs an interpreter with OpenEnv."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from podium.errors import ConfigError, PodiumError
from podium.rollout.environments import EnvironmentConfig
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium_agents.environments.resolve import resolve_environment
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import metrics_rows, tiny

pytest.importorskip("podium_openenv")

SERVER = """
import sys
import time
import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Heard(text="=", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        digits = sum(c.isdigit() for c in action.message)
        return Heard(text="=", reward=digits / 3, done=self.turns == 2)

    @property
    def state(self):
        return State(episode_id="x", step_count=self.turns)


if __name__ == "__main__":
    app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def test_a_server_of_openenv_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("websockets")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    environment = {"name": "openenv", "options": {"url": url}}
    config = tiny(GRPOConfig, tmp_path, data={"chat_template": str(tmp_path / "chat.jinja")}, environment=environment)
    with pytest.raises(PodiumError, match=r"environment\.options\.url: nobody answers at ws://127\.0\.0\.1"):
        PPOTrainer(config, cluster="inline", show=False).fit()


@pytest.mark.slow
def test_an_environment_behind_a_server_of_openenv_is_lived_in(tmp_path: Path) -> None:
    python = os.environ.get("PODIUM_OPENENV_PYTHON")
    if not python:
        pytest.skip("PODIUM_OPENENV_PYTHON does not name the interpreter of an environment with openenv 0.10")
    pytest.importorskip("websockets")
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, "the server ended"
            time.sleep(0.2)
        config = tiny(
            GRPOConfig,
            tmp_path,
            data={"chat_template": str(tmp_path / "chat.jinja")},
            environment={
                "name": "openenv",
                "options": {"url": f"http://127.0.0.1:{port}", "observation": "text"},
            },
            run={"steps": 1},
            eval={"items": 0},
        )
        PPOTrainer(config, cluster="inline", show=False).fit()
    finally:
        server.kill()
        server.wait()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_TURNS]) == (0, 2)
    assert row[metrics.REWARD_MEAN] > 0
    assert row[metrics.MISMATCH_MAX] < 1e-5


@pytest.mark.skipif(importlib.util.find_spec("websockets") is not None, reason="websockets is installed")
def test_websockets_that_are_absent_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(ConfigError, match=r"needs websockets, .* not installed: pip install 'websockets>=13'"):
        resolve_environment(EnvironmentConfig(name="openenv", options={"url": "http://127.0.0.1:1"}))
