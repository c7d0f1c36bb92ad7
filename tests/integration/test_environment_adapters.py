"""Environments of other projects. Each test needs its project, and says so where it is absent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, PodiumError
from podium.rollout.environments.adapters import verifiers_child
from podium.rollout.environments.adapters.textarena import TextArena
from podium.rollout.environments.adapters.verifiers import Verifiers
from podium.rollout.environments.config import EnvironmentConfig, SessionLimits
from podium.rollout.environments.resolve import resolve_environment
from podium.rollout.environments.runner import Episode, live
from podium.rollout.sampling import SamplingParams
from podium.rollout.service.gateway import gateway
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.service.scripted import scripted
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


def silly(text: str) -> str:
    """Makes no move."""
    time.sleep(0.01)
    return "I do not know."


async def patient(text: str) -> str:
    """Takes the first free square."""
    return re.findall(r"\[\d\]", text.splitlines()[-1])[0]


def mute(text: str) -> None:
    """Forgets to return its move."""


def played(answers: list[str], seat: int = 0, time_limit_s: float = 30.0, **options: Any) -> tuple[Episode, list[str]]:
    """A game in which the policy gives these answers, and what it has read and said, by agent."""
    game = TextArena(**{"env": "TicTacToe-v0", **options})
    service, _, tokenizer = scripted(*[f"{answer}<|im_end|>" for answer in answers])
    tasks, limits = [{"seat": seat, "seed": 0}], SessionLimits(time_limit_s=time_limit_s)
    (episode,) = asyncio.run(live(game.play, tasks, [0], ["s"], service, limits, address=lambda: ""))
    return episode, [tokenizer.decode(row.ids) for one in episode.trajectories for row in one.session.rows]


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("game", ["won", "drawn"])
def test_each_seat_of_a_whole_game_has_its_own_reward_and_its_own_moves(seat: int, game: str) -> None:
    pytest.importorskip("textarena")
    moves = {"won": "03142", "drawn": "012435768"}[game]
    episode, texts = played([f"[{move}]" for move in moves], seat)
    assert episode.failure == ""
    rewards = {"won": (1.0, -1.0), "drawn": (0.0, 0.0)}[game]
    first, second = episode.trajectories
    assert (first.agent, second.agent) == ("", f"player-{1 - seat}")
    assert (first.score, second.score) == (rewards[seat], rewards[1 - seat])
    for place, trajectory, text in ((seat, first, texts[0]), (1 - seat, second, texts[1])):
        (row,) = trajectory.session.rows
        assert sum(row.sampled) == 4 * len(moves[place::2])
        assert re.findall(r"assistant\n\[(\d)\]", text) == list(moves[place::2])
        assert f"You are Player {place}" in text
        assert f"You are Player {1 - place}" not in text


def test_what_a_player_said_is_read_with_the_name_of_the_player() -> None:
    pytest.importorskip("textarena")
    said = ["hello", "both", "neither", "[1 defect] [2 defect]"]
    _, texts = played([*said, *["[0 cooperate]"] * 2, *["hm"] * 99], env="ThreePlayerIPD-v0", players=3)
    assert "[Player 0] hello\n[Player 1] both\n[Player 2] neither\n" in texts[0]


def test_an_opponent_is_a_function_of_what_its_player_reads() -> None:
    pytest.importorskip("textarena")
    episode, (text,) = played(["[8]", "[4]", "[7]"], opponent=f"{__file__}:patient")
    assert (episode.failure, episode.trajectories[0].score) == ("", -1.0)
    assert "Player 1 placed their symbol (X) in cell 2" not in text  # with which it won
    assert "[Player 1] [0]\nPlayer 1 placed their symbol (X) in cell 0" in text


def test_a_game_that_the_opponent_loses_by_invalid_moves_is_told_apart() -> None:
    pytest.importorskip("textarena")
    episode, _ = played(["[8]"], opponent=f"{__file__}:silly")
    assert episode.trajectories[0].score == 1.0
    assert episode.parts == {"win": 1.0, "invalid": 0.0, "opponent_invalid": 1.0}
    episode, _ = played(["[9]", "[10]"], opponent=f"{__file__}:silly")
    assert episode.trajectories[0].score == -1.0
    assert episode.parts == {"win": 0.0, "invalid": 1.0, "opponent_invalid": 0.0}


def test_an_opponent_that_returns_no_text_fails_the_session() -> None:
    pytest.importorskip("textarena")
    episode, _ = played(["[8]"], opponent=f"{__file__}:mute")
    assert "environment.options.opponent returned NoneType" in episode.failure


def test_the_random_opponent_takes_no_move_from_what_the_policy_says() -> None:
    pytest.importorskip("textarena")
    episode, (text,) = played(["[col 6]"] * 3 + ["[col 5]"] * 30, env="ConnectFour-v0", opponent="random")
    assert episode.failure == ""
    assert not re.findall(r"Player 1 dropped their disk \(O\) into column [56]", text)


def test_sessions_of_a_prompt_meet_random_opponents_that_differ_and_a_repeated_run_meets_the_same() -> None:
    pytest.importorskip("textarena")
    game = TextArena("TicTacToe-v0", opponent="random")

    def first_moves() -> list[str]:
        service, _, tokenizer = scripted(*["none<|im_end|>"] * 16)
        names, limits = [f"s{number}" for number in range(8)], SessionLimits()
        tasks = [{"seat": 1, "seed": 0}] * 8
        episodes = asyncio.run(live(game.play, tasks, range(8), names, service, limits, address=lambda: ""))
        texts = [tokenizer.decode(one.trajectories[0].session.rows[0].ids) for one in episodes]
        return [re.findall(r"\(O\) in cell (\d)", text)[0] for text in texts]

    assert len(set(found := first_moves())) > 1
    assert found == first_moves()


def test_a_game_that_goes_on_for_ever_ends_with_its_session() -> None:
    """Poker of textarena asks again and again for a move that is allowed."""
    pytest.importorskip("textarena")
    episode, _ = played([], seat=1, env="Poker-v0", opponent="random", time_limit_s=1.0)
    assert episode.failure == "time limit"


def test_a_game_that_textarena_does_not_have_is_refused() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=r"environment.options.env = 'TikTakToe-v0'"):
        resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TikTakToe-v0"}))


def test_a_project_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    try:
        import textarena  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'podium\[textarena\]'"):
            resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TicTacToe-v0"}))
    else:
        pytest.skip("textarena is installed")


PAGE = Path(__file__).parents[2] / "docs" / "coming-from-verifiers.md"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_taskset_of_verifiers_is_lived_by_its_own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("PODIUM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PODIUM_VERIFIERS_PYTHON does not name the interpreter of an environment with verifiers 0.4 and uv")
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


def shopped(
    answers: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, user: list[str] | None = None, **options: Any
) -> tuple[Episode, list[str]]:
    """The episode in which the policy answers so, and what it said in each row. ``user`` is what another model says."""
    python = os.environ.get("PODIUM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PODIUM_VERIFIERS_PYTHON does not name the interpreter of an environment with verifiers 0.4 and uv")
    (folder / "shop.py").write_text(SHOP)
    monkeypatch.chdir(folder)
    python = os.path.relpath(python)
    monkeypatch.setenv("USER_KEY", "other")
    service, _, tokenizer = scripted(*[f"{answer}<|im_end|>" for answer in answers])
    service.rules = SamplingParams(max_new_tokens=512)
    other, _, _ = scripted(*[f"{answer}<|im_end|>" for answer in user or []])

    async def main() -> list[Episode]:
        async with gateway(service, "key") as address, gateway(other, "other") as elsewhere:
            if user is not None:
                client = {"type": "eval", "base_url": f"{elsewhere()}/v1", "api_key_var": "USER_KEY"}
                options["config"]["user"] = {**NULL, "model": "tiny", "client": client}
            world = Verifiers("shop", python=python, **options)
            limits = SessionLimits(time_limit_s=90.0)
            return await live(world.play, [{"place": 0}], [0], ["s"], service, limits, address=address, api_key="key")

    (episode,) = asyncio.run(main())
    rows = [row for one in episode.trajectories for row in one.session.rows]
    return episode, [
        tokenizer.decode([id for id, own in zip(row.ids, row.sampled, strict=True) if own]) for row in rows
    ]


@pytest.mark.slow
def test_tools_of_a_taskset_are_called_in_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [f'<tool_call>{{"name": "shop_price", "arguments": {{"name": "{each}"}}}}</tool_call>' for each in "ab"]
    episode, (said,) = shopped(["".join(calls), calls[0].replace('"a"', '"bolt"'), "3"], tmp_path, monkeypatch)
    assert (episode.failure, episode.trajectories[0].score, dict(episode.parts)) == ("", 2.0, {"right": 1.0})
    assert said.count("<tool_call>") == 3
    assert said.count("<|im_end|>") == 3


@pytest.mark.slow
def test_an_agent_that_is_not_to_be_trained_has_no_part_in_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["What is a bolt?", "Yes.", "###DONE###"]
    config = {"id": "user-sim", "assistant": NULL, "user": NULL}
    episode, rows = shopped(["Do you mean its price?", "3"], tmp_path, monkeypatch, said, config=dict(config))
    assert (episode.failure, episode.trajectories[0].score) == ("", 2.0)
    assert rows == ["Do you mean its price?<|im_end|>3<|im_end|>"]
    episode, _ = shopped(["What is a bolt?", "3", "###DONE###"], tmp_path, monkeypatch, config=dict(config))
    assert "the agent 'user' is not to be trained (trainable = False), but the policy answers it" in episode.failure


@pytest.mark.slow
def test_what_keeps_verifiers_from_starting_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_IS_CLOSED", "1")
    episode, _ = shopped([], tmp_path, monkeypatch)
    assert "ended with exit status 1: LookupError: the shop is closed" in episode.failure


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"retries": {"max_retries": 2}}, "retries"),
        ({"agent": {"retries": {"rules": [{"type": "ProviderError", "max_retries": 1}]}}}, "agent.retries"),
        ({"agent": {"retries": {"max_retries": 0, "rules": []}}, "verifier": {"retries": 2}}, None),
    ],
)
def test_episodes_that_verifiers_would_begin_again_are_found(config: dict[str, Any], where: str | None) -> None:
    assert next(verifiers_child.retries(config), None) == where


@pytest.mark.slow
def test_episodes_that_verifiers_would_begin_again_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said in an abandoned episode would have the reward of another."""
    config = {"agent": {**NULL, "retries": {"max_retries": 1}}}
    episode, _ = shopped([], tmp_path, monkeypatch, config=config)
    refused = "environment.options.config.agent.retries begins failed episodes again"
    assert refused in episode.failure
    world = Verifiers("shop", python=os.path.relpath(os.environ["PODIUM_VERIFIERS_PYTHON"]), config=config)
    with pytest.raises(ConfigError, match=rf"^environment.options.taskset = 'shop': ValueError: {refused}.*fail$"):
        world.tasks("train")


@pytest.mark.slow
def test_a_setting_that_verifiers_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("PODIUM_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("PODIUM_VERIFIERS_PYTHON does not name the interpreter of an environment with verifiers 0.4 and uv")
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    world = Verifiers("shop", python=os.path.relpath(python), config={"agent": {**NULL, "retrys": 1}})
    with pytest.raises(ConfigError, match=r"environment.options.taskset = 'shop': ValidationError: (.|\n)*retrys"):
        world.tasks("train")


def test_an_interpreter_that_has_no_verifiers_is_named() -> None:
    options = {"taskset": "copying", "python": sys.executable}
    found = resolve_environment(EnvironmentConfig(name="verifiers", options=options))
    assert found.tasks is not None
    with pytest.raises(ConfigError, match=r"environment.options.taskset = 'copying': .*verifiers is to be installed"):
        found.tasks("train")
    with pytest.raises(ConfigError, match=r"there is no such interpreter"):
        resolve_environment(EnvironmentConfig(name="verifiers", options={**options, "python": "/nowhere"}))


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
        deadline = time.monotonic() + 50
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None and time.monotonic() < deadline, "the server does not listen"
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
