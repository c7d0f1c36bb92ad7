"""A critic and a teacher of their own read the policy's ids, which have to mean the same to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.models import ModelConfig, load_model, load_tokenizer
from podium.models.loading import save_pretrained
from podium.models.whole_weights import full_weights
from podium.trainer import GRPOConfig, PPOConfig
from podium.trainer.checks.other_models import check_other_models
from tests.integration.training import MODEL, tiny

ALPHABETS = {
    "permuted": "chars:=9876543210 ",
    "smaller": "chars:012",
    "larger": "chars:abc0123456789= ",
}


def write_model(folder: Path, tokenizer: str, **fields: Any) -> str:
    model = load_model(ModelConfig(config={**MODEL["config"], **fields}, tokenizer=tokenizer))
    save_pretrained(model, dict(full_weights(model)), folder, load_tokenizer(tokenizer))
    return str(folder)


def check(folder: Path, role: str, path: str, longest: int | None = 20) -> None:
    options = {"loss": "teacher_kl", "options": {"teacher": path}}
    config = (
        tiny(PPOConfig, folder, critic={"path": path})
        if role == "critic"
        else tiny(GRPOConfig, folder, algorithm=options)
    )
    check_other_models(config, load_tokenizer(MODEL["tokenizer"]), longest)


@pytest.mark.parametrize("role", ["critic", "teacher"])
@pytest.mark.parametrize("name", ALPHABETS)
def test_a_model_to_which_ids_mean_other_tokens_is_refused(tmp_path: Path, role: str, name: str) -> None:
    path = write_model(tmp_path / name, ALPHABETS[name])
    key = "critic.path" if role == "critic" else "algorithm.options.teacher"
    with pytest.raises(ConfigError, match=rf"{key} = .*another vocabulary than model\.path: .*choose a {role} of the"):
        check(tmp_path, role, path)


@pytest.mark.parametrize("role", ["critic", "teacher"])
def test_a_model_with_the_policys_vocabulary_needs_its_positions_too(tmp_path: Path, role: str) -> None:
    path = write_model(tmp_path / "short", MODEL["tokenizer"], max_position_embeddings=16)
    check(tmp_path, role, path, longest=16)
    with pytest.raises(ConfigError, match=rf"has 16 positions.*may have 17 tokens.*a {role} with more positions"):
        check(tmp_path, role, path, longest=17)


def test_a_critics_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = load_model(ModelConfig(config=MODEL["config"], tokenizer=MODEL["tokenizer"]))
    save_pretrained(model, dict(full_weights(model)), tmp_path / "bare", None)
    with pytest.raises(ConfigError, match=r"critic\.path = .*its directory must hold the files of its tokenizer"):
        check(tmp_path, "critic", str(tmp_path / "bare"))


def test_a_path_that_no_critic_has_is_not_read(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, critic={"path": "nowhere"})
    check_other_models(config, load_tokenizer(MODEL["tokenizer"]), 20)
