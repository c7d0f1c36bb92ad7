"""The data's own answers to the prompts of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.tasks import DataConfig, EncodedPrompts, Example, PromptStream
from podium.rollout.tasks.encode import TokenRows
from podium.rollout.tasks.examples import map_columns
from podium.trainer import GRPOConfig
from podium.trainer.prompts import Prompt, Prompts
from podium.trainer.updates import Answers
from tests.integration.training import tiny
from tests.unit.rollout.tasks.test_spans import CHATML, make_tokenizer


@pytest.mark.parametrize("splits", [False, True])
def test_answers_of_conversations_are_learned_whether_or_not_fine_tuning_splits_turns(
    tmp_path: Path, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split makes other examples than those of the prompts, by which the answers are looked up."""
    monkeypatch.setattr("podium.trainer.updates.check_examples", lambda *arguments: None)  # the model has no such words
    turns: Any = [("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    values: dict[str, Any] = {
        "data": {"split_turns": splits},
        "algorithm": {"loss": {"ppo_clip": 1, "cross_entropy": 1}},
    }
    config = tiny(GRPOConfig, tmp_path, **values)
    examples = [map_columns(f"row {number}", row, DataConfig()) for number in range(2)]
    answers = Answers(config, examples, make_tokenizer(CHATML))
    prompts = [Prompt(torch.tensor([1]), example, lambda ids: "") for example in examples]
    batch = answers.batch_of(prompts, [0, 0, 1, 1])
    assert batch is not None and len(batch) == 2


@pytest.mark.parametrize("begins", [False, True])
def test_answers_of_a_replay_follow_the_recorded_tokens(
    tmp_path: Path, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that puts a token before each text would put another one before the text of a recorded prompt."""
    monkeypatch.setattr("podium.trainer.updates.check_examples", lambda *arguments: None)  # the model has no such words
    engine = {"name": "replay", "options": {"run": str(tmp_path)}}
    algorithm = {"loss": {"ppo_clip": 1, "cross_entropy": 1}}
    config = tiny(GRPOConfig, tmp_path, engine=engine, algorithm=algorithm, eval={"items": 0})
    tokenizer = make_tokenizer(None)
    row = {"prompt": "2+2=", "answer": "4"}
    tokens = [[1] * begins + tokenizer.encode(row["prompt"], add_special_tokens=False)]
    rows = TokenRows(torch.tensor(tokens[0], dtype=torch.int32), torch.tensor([0, len(tokens[0])]))
    prompts = Prompts([Example("2+2=", "4", row, place="step 1, prompt 0")], EncodedPrompts(rows, [0], 0, 0), tokenizer)
    stream = PromptStream[Prompt](prompts, 0, shuffle=False)
    if begins:
        with pytest.raises(ConfigError, match=r"^step 1, prompt 0: algorithm\.loss = .*: drop cross_entropy, or train"):
            Answers.of(config, stream, tokenizer)
        return
    answers = Answers.of(config, stream, tokenizer)
    assert answers is not None
    batch = answers.batch_of(prompts, [0])
    assert batch is not None and batch.jagged("tokens").values.tolist()[:-2] == tokens[0]
