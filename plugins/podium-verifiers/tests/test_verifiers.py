"""The tasksets of verifiers. Tests that run them need an interpreter with verifiers, which a variable names."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.config import config_to_yaml
from podium.errors import ConfigError
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.rollout.sampling import SamplingParams
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium_agents.environments.resolve import resolve_environment
from podium_agents.environments.runner import Episode, live
from podium_serve.gateway import Gateway
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import metrics_rows, tiny
from tests.unit.rollout.service.scripted import scripted

Verifiers = pytest.importorskip("podium_verifiers").Verifiers
find_retries = pytest.importorskip("podium_verifiers.child").find_retries
pytestmark = pytest.mark.timeout(2000)  # an episode starts several interpreters, which a busy machine makes slow
PAGE = Path(__file__).parents[3] / "docs" / "coming-from-verifiers.md"


def find_python() -> str:
    """Return the interpreter that has verifiers, or skip the test."""
    python = os.environ.get("PODIUM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PODIUM_VERIFIERS_PYTHON does not name the interpreter of an environment with verifiers 0.4 and uv")
    return python


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_lived_by_its_own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = find_python()
    (code,) = re.findall(r"```python\n(# copying.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "copying.py").write_text(code)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    python = os.path.relpath(python)  # as the page writes it; verifiers runs programs in directories of its own
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


SHOP = """
import os
import verifiers.v1 as vf

__all__ = ["Shop"]


class ShopData(vf.TaskData):
    answer: str


class Prices(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "shop"

    @vf.tool
    async def price(self, name: str) -> int:
        "Look a price up."
        return {"bolt": 3}[name]


class ShopConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopConfig]):
    @classmethod
    def toolsets(cls, config):
        if os.environ.get("SHOP_IS_CLOSED"):
            raise LookupError("the shop is closed")
        return [Prices(config.tools)]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Shop(vf.Taskset[ShopTask, ShopTasksetConfig]):
    def load(self):
        yield ShopTask(ShopData(prompt="What is a bolt?", answer="3"), self.config.task)


if __name__ == "__main__":
    Prices.run()
"""
NULL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def live_in_shop(
    answers: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, user: list[str] | None = None, **options: Any
) -> tuple[Episode, list[str]]:
    """Live an episode in which the policy gives these answers. Returns it and what the policy said in each row.

    ``user`` is what another model says.
    """
    python = find_python()
    (folder / "shop.py").write_text(SHOP)
    monkeypatch.chdir(folder)
    python = os.path.relpath(python)
    service, _, tokenizer = scripted(*[f"{answer}<|im_end|>" for answer in answers])
    service.rules = SamplingParams(max_new_tokens=512)
    other, _, _ = scripted(*[f"{answer}<|im_end|>" for answer in user or []])

    async def main() -> list[Episode]:
        policy, stranger = Gateway(), Gateway()
        async with policy.open(service, "s") as address, stranger.open(other, "user") as elsewhere:
            monkeypatch.setenv("USER_KEY", stranger.keys.key_of("user"))
            if user is not None:
                client = {"type": "eval", "base_url": f"{elsewhere()}/v1", "api_key_var": "USER_KEY"}
                options["config"]["user"] = {**NULL, "model": "tiny", "client": client}
            world = Verifiers("shop", python=python, **options)
            limits = SessionLimits(time_limit_s=900.0)
            how: Any = {"address": address, "key_of": policy.keys.key_of}
            return await live(world.play, [{"place": 0}], [0], ["s"], service, limits, **how)

    (episode,) = asyncio.run(main())
    rows = [row for trajectory in episode.trajectories for row in trajectory.session.rows]
    return episode, [
        tokenizer.decode([id for id, sampled in zip(row.ids, row.sampled, strict=True) if sampled]) for row in rows
    ]


@pytest.mark.slow
def test_tools_of_a_taskset_are_called_in_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [f'<tool_call>{{"name": "shop_price", "arguments": {{"name": "{name}"}}}}</tool_call>' for name in "ab"]
    episode, (text,) = live_in_shop(["".join(calls), calls[0].replace('"a"', '"bolt"'), "3"], tmp_path, monkeypatch)
    assert (episode.failure, episode.trajectories[0].score, dict(episode.parts)) == ("", 2.0, {"right": 1.0})
    assert text.count("<tool_call>") == 3
    assert text.count("<|im_end|>") == 3


@pytest.mark.slow
def test_an_agent_that_is_not_to_be_trained_has_no_part_in_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["What is a bolt?", "Yes.", "###DONE###"]
    config = {"id": "user-sim", "assistant": NULL, "user": NULL}
    episode, rows = live_in_shop(["Do you mean its price?", "3"], tmp_path, monkeypatch, answers, config=dict(config))
    assert (episode.failure, episode.trajectories[0].score) == ("", 2.0)
    assert rows == ["Do you mean its price?<|im_end|>3<|im_end|>"]
    episode, _ = live_in_shop(["What is a bolt?", "3", "###DONE###"], tmp_path, monkeypatch, config=dict(config))
    assert "the agent 'user' is not to be trained (trainable = False), but the policy answers it" in episode.failure


@pytest.mark.slow
def test_what_keeps_verifiers_from_starting_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_IS_CLOSED", "1")
    episode, _ = live_in_shop([], tmp_path, monkeypatch)
    assert "ended with exit code 1: LookupError: the shop is closed" in episode.failure


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"retries": {"max_retries": 2}}, "retries"),
        ({"agent": {"retries": {"rules": [{"type": "ProviderError", "max_retries": 1}]}}}, "agent.retries"),
        ({"agent": {"retries": {"max_retries": 0, "rules": []}}, "verifier": {"retries": 2}}, None),
    ],
)
def test_the_key_that_would_begin_episodes_again_is_named(config: dict[str, Any], where: str | None) -> None:
    assert next(find_retries(config), None) == where


@pytest.mark.slow
def test_episodes_that_verifiers_would_begin_again_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said in an abandoned episode would have the reward of another."""
    config = {"agent": {**NULL, "retries": {"max_retries": 1}}}
    episode, _ = live_in_shop([], tmp_path, monkeypatch, config=config)
    refused = "environment.options.config.agent.retries repeats failed episodes"
    assert refused in episode.failure
    world = Verifiers("shop", python=os.path.relpath(os.environ["PODIUM_VERIFIERS_PYTHON"]), config=config)
    with pytest.raises(ConfigError, match=rf"^environment.options.taskset = 'shop': ValueError: {refused}.*fail$"):
        world.tasks("train")


@pytest.mark.slow
def test_a_setting_that_verifiers_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = find_python()
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    world = Verifiers("shop", python=os.path.relpath(python), config={"agent": {**NULL, "retrys": 1}})
    with pytest.raises(ConfigError, match=r"environment.options.taskset = 'shop': ValidationError: (.|\n)*retrys"):
        world.tasks("train")


def test_an_interpreter_that_has_no_verifiers_is_named() -> None:
    options = {"taskset": "copying", "python": sys.executable}
    environment = resolve_environment(EnvironmentConfig(name="verifiers", options=options))
    assert environment.tasks is not None
    with pytest.raises(ConfigError, match=r"environment.options.taskset = 'copying': .*verifiers is to be installed"):
        environment.tasks("train")
    with pytest.raises(ConfigError, match=r"there is no such interpreter"):
        resolve_environment(EnvironmentConfig(name="verifiers", options={**options, "python": "/nowhere"}))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"taskset": "gsm8k", "python": "python"}, "python"),
        ({"taskset": "gsm8k", "config": {"agent": {"python": ["../run/python"]}}}, "config.agent.python"),
        ({"taskset": "code"}, "taskset"),
        ({"taskset": "gsm8k", "config": {"id": "code"}}, "config.id"),
    ],
)
def test_a_resume_and_an_evaluation_run_no_code_of_a_strangers_run(
    options: dict[str, Any],
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, mark = tmp_path / "runs" / "run", tmp_path / "code was run"
    (run / "model").mkdir(parents=True)
    (run / "python").write_text(f"#!/bin/sh\ntouch {str(mark)!r}\n")
    (run / "python").chmod(0o755)
    (run / "code.py").write_text(f"open({str(mark)!r}, 'w')\ndef play(text): return 'a'\n")
    monkeypatch.chdir(run)
    config = tiny(GRPOConfig, tmp_path, environment={"name": "verifiers", "options": options}, data={"train": ""})
    (run / "config.yaml").write_text(config_to_yaml(config))
    for command in (["train", "grpo", "--resume", str(run), "--dry-run"], ["eval", str(run)]):
        assert main(command) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert f"environment.options.{key} = " in words
        assert "is code in the directory of the run itself" in words or "names code that is not Podium's own" in words
    assert not mark.exists()
