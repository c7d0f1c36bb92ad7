"""The games of textarena. Tests that play need it, and are skipped and counted where it is absent."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.config import config_to_yaml
from podium.errors import ConfigError
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium_agents.environments.resolve import resolve_environment
from podium_agents.environments.runner import Episode, live
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.service.scripted import scripted
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of

TextArena = pytest.importorskip("podium_textarena").TextArena
IS_INSTALLED = importlib.util.find_spec("textarena") is not None
plays = pytest.mark.skipif(not IS_INSTALLED, reason="textarena is not installed")


@plays
@pytest.mark.parametrize("opponent", ["self", "random"])
def test_a_game_of_textarena_is_play_game(opponent: str, tmp_path: Path) -> None:
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


def play_game(
    answers: list[str], seat: int = 0, time_limit_s: float = 300.0, **options: Any
) -> tuple[Episode, list[str]]:
    """Play a game in which the policy gives these answers. Returns its episode and the text of each agent's rows."""
    game = TextArena(**{"env": "TicTacToe-v0", **options})
    service, _, tokenizer = scripted(*[f"{answer}<|im_end|>" for answer in answers])
    tasks, limits = [{"seat": seat, "seed": 0}], SessionLimits(time_limit_s=time_limit_s)
    (episode,) = asyncio.run(live(game.play, tasks, [0], ["s"], service, limits, address=lambda: ""))
    return episode, [
        tokenizer.decode(row.ids) for trajectory in episode.trajectories for row in trajectory.session.rows
    ]


@plays
@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("game", ["won", "drawn"])
def test_each_seat_of_a_whole_game_has_its_own_reward_and_its_own_moves(seat: int, game: str) -> None:
    moves = {"won": "03142", "drawn": "012435768"}[game]
    episode, texts = play_game([f"[{move}]" for move in moves], seat)
    assert episode.failure == ""
    rewards = {"won": (1.0, -1.0), "drawn": (0.0, 0.0)}[game]
    first, second = episode.trajectories
    assert (first.agent, second.agent) == ("", f"player-{1 - seat}")
    assert (first.score, second.score) == (rewards[seat], rewards[1 - seat])
    for player, trajectory, text in ((seat, first, texts[0]), (1 - seat, second, texts[1])):
        (row,) = trajectory.session.rows
        assert sum(row.sampled) == 4 * len(moves[player::2])
        assert re.findall(r"assistant\n\[(\d)\]", text) == list(moves[player::2])
        assert f"You are Player {player}" in text
        assert f"You are Player {1 - player}" not in text


@plays
def test_what_a_player_said_is_read_with_the_name_of_the_player() -> None:
    messages = ["hello", "both", "neither", "[1 defect] [2 defect]"]
    _, texts = play_game([*messages, *["[0 cooperate]"] * 2, *["hm"] * 99], env="ThreePlayerIPD-v0", players=3)
    assert "[Player 0] hello\n[Player 1] both\n[Player 2] neither\n" in texts[0]


@plays
def test_an_opponent_is_a_function_of_what_its_player_reads() -> None:
    episode, (text,) = play_game(["[8]", "[4]", "[7]"], opponent=f"{__file__}:patient")
    assert (episode.failure, episode.trajectories[0].score) == ("", -1.0)
    assert "Player 1 placed their symbol (X) in cell 2" not in text  # with which it won
    assert "[Player 1] [0]\nPlayer 1 placed their symbol (X) in cell 0" in text


@plays
def test_a_game_that_the_opponent_loses_by_invalid_moves_is_told_apart() -> None:
    episode, _ = play_game(["[8]"], opponent=f"{__file__}:silly")
    assert episode.trajectories[0].score == 1.0
    assert episode.parts == {"win": 1.0, "invalid": 0.0, "opponent_invalid": 1.0}
    episode, _ = play_game(["[9]", "[10]"], opponent=f"{__file__}:silly")
    assert episode.trajectories[0].score == -1.0
    assert episode.parts == {"win": 0.0, "invalid": 1.0, "opponent_invalid": 0.0}


@plays
def test_an_opponent_that_returns_no_text_fails_the_session() -> None:
    episode, _ = play_game(["[8]"], opponent=f"{__file__}:mute")
    assert "environment.options.opponent returned NoneType" in episode.failure


@plays
def test_the_random_opponent_takes_no_move_from_what_the_policy_says() -> None:
    episode, (text,) = play_game(["[col 6]"] * 3 + ["[col 5]"] * 30, env="ConnectFour-v0", opponent="random")
    assert episode.failure == ""
    assert not re.findall(r"Player 1 dropped their disk \(O\) into column [56]", text)


@plays
def test_sessions_of_a_prompt_meet_random_opponents_that_differ_and_a_repeated_run_meets_the_same() -> None:
    game = TextArena("TicTacToe-v0", opponent="random")

    def first_moves() -> list[str]:
        service, _, tokenizer = scripted(*["none<|im_end|>"] * 16)
        names, limits = [f"s{number}" for number in range(8)], SessionLimits()
        tasks = [{"seat": 1, "seed": 0}] * 8
        episodes = asyncio.run(live(game.play, tasks, range(8), names, service, limits, address=lambda: ""))
        texts = [tokenizer.decode(episode.trajectories[0].session.rows[0].ids) for episode in episodes]
        return [re.findall(r"\(O\) in cell (\d)", text)[0] for text in texts]

    assert len(set(moves := first_moves())) > 1
    assert moves == first_moves()


@plays
def test_a_game_that_goes_on_for_ever_ends_with_its_session() -> None:
    """Poker of textarena asks again and again for a move that is allowed."""
    episode, _ = play_game([], seat=1, env="Poker-v0", opponent="random", time_limit_s=1.0)
    assert episode.failure == "time limit"


@plays
def test_a_game_that_textarena_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment.options.env = 'TikTakToe-v0'"):
        resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TikTakToe-v0"}))


@pytest.mark.skipif(IS_INSTALLED, reason="textarena is installed")
def test_textarena_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"needs textarena, .* not installed: pip install 'textarena>=0\.7'"):
        resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TicTacToe-v0"}))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"env": "TicTacToe-v0", "opponent": "code.py:play"}, "is code in the directory of the run itself"),
        ({"env": "TicTacToe-v0", "opponent": "code:play"}, "is code in the directory of the run itself"),
        ({"env": "TicTacToe-v0", "opponent": "os:system"}, "names code that is not Podium's own"),
    ],
)
def test_a_resume_and_an_evaluation_run_no_code_of_a_strangers_run(
    options: dict[str, Any],
    why: str,
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
    config = tiny(GRPOConfig, tmp_path, environment={"name": "textarena", "options": options}, data={"train": ""})
    (run / "config.yaml").write_text(config_to_yaml(config))
    for command in (["train", "grpo", "--resume", str(run), "--dry-run"], ["eval", str(run)]):
        assert main(command) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert "environment.options." in words
        assert why in words
    assert not mark.exists()
