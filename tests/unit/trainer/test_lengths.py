"""Prompts and the model's positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.trainer import GRPOConfig, PPOTrainer
from podium.workers import ModelConfig, load_model, load_tokenizer
from podium.workers.models import longest_text
from tests.integration.training import MODEL, tiny


@pytest.mark.parametrize(
    ("sampling", "data", "message"),
    [
        (30, {}, r"longest training prompt has 3 tokens.*32 positions.*data\.max_prompt_tokens to 2 \("),
        (40, {}, r"32 positions: lower sampling\.max_new_tokens$"),
        (26, {"eval": "long.jsonl"}, r"longest held-out prompt has 8 tokens"),
    ],
)
def test_a_prompt_that_the_model_has_no_room_for_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: int, data: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text('{"prompt": "1234567=", "answer": "1"}\n')
    config = tiny(GRPOConfig, tmp_path, sampling={"max_new_tokens": sampling}, data=data)
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(config, cluster="inline", show=False).fit()
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


def test_the_longest_text_is_the_models_own(tmp_path: Path) -> None:
    tiny_model = ModelConfig(**MODEL)
    assert longest_text(tiny_model) == 32
    load_model(tiny_model).save_pretrained(tmp_path)
    load_tokenizer(tiny_model.tokenizer).save_pretrained(tmp_path)
    assert longest_text(ModelConfig(path=str(tmp_path))) == 32
    with pytest.raises(ConfigError, match="its configuration cannot be read"):
        longest_text(ModelConfig(path=str(tmp_path / "absent")))
