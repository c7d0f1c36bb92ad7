"""Environments of other projects. Each test needs its project, and says so where it is absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.environments.resolve import resolve_environment
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of


@pytest.mark.parametrize("opponent", ["self", "random"])
def test_a_game_of_textarena_is_played(opponent: str, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    tokenizer_of(FAMILIES[0]).save_pretrained(tmp_path / "tokenizer")
    shape = {**MODEL["config"], "max_position_embeddings": 4096}
    config = tiny(
        GRPOConfig,
        tmp_path,
        model={"config": shape, "tokenizer": str(tmp_path / "tokenizer")},
        data={"train": ""},
        environment={"name": "textarena", "options": {"env": "TicTacToe-v0", "opponent": opponent}},
        run={"steps": 1},
        sampling={"max_new_tokens": 8},
        eval={"items": 2},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert row[metrics.SESSIONS_FAILED] == 0
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert -1 <= row[metrics.REWARD_MEAN] <= 1
    assert "reward_parts/invalid" in row


def test_a_game_that_textarena_does_not_have_is_refused() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=r"environment.options.env = 'TikTakToe-v0'"):
        resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TikTakToe-v0"}))


def test_a_project_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    try:
        import textarena  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install textarena"):
            resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TicTacToe-v0"}))
    else:
        pytest.skip("textarena is installed")


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Copying"]


class CopyData(vf.TaskData):
    answer: str


class CopyTask(vf.Task[CopyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Copying(vf.Taskset[CopyTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            yield CopyTask(CopyData(prompt=f"{n:02d}=", answer=f"{n:02d}"), self.config.task)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_taskset_of_verifiers_is_lived_by_its_own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("PODIUM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PODIUM_VERIFIERS_PYTHON does not name the interpreter of an environment with verifiers 0.4 and uv")
    (tmp_path / "copying.py").write_text(TASKSET)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    config = tiny(
        GRPOConfig,
        tmp_path,
        data={"train": "", "chat_template": str(tmp_path / "chat.jinja")},
        environment={"name": "verifiers", "options": {"taskset": "copying", "python": python}},
        run={"steps": 1},
        batch={"prompts": 2},
        eval={"items": 1},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_ROWS]) == (0, 8)
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert 0 <= row["reward_parts/right"] <= 1


def test_an_interpreter_that_has_no_verifiers_is_named() -> None:
    options = {"taskset": "copying", "python": sys.executable}
    found = resolve_environment(EnvironmentConfig(name="verifiers", options=options))
    assert found.tasks is not None
    with pytest.raises(ConfigError, match=r"environment.options.taskset = 'copying': .*verifiers is to be installed"):
        found.tasks("train")
    with pytest.raises(ConfigError, match=r"there is no such interpreter"):
        resolve_environment(EnvironmentConfig(name="verifiers", options={**options, "python": "/nowhere"}))
