"""A model that is written ends its answers elsewhere, too, with the token with which it has learned to end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.models import char_tokenizer
from podium.models.vocabulary import write_ends
from podium.runs.run_files import RunFiles
from podium.trainer.checkpointing import ModelExtras, write_model
from podium_inference.export import _write_ends
from tests.unit.rollout.service.scripted import ALPHABET, CHATML, SPECIAL


class Policy:
    """A policy whose model has a generation_config.json of this content."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self._settings = settings

    def save_pretrained(self, folder: str) -> None:
        if self._settings is not None:
            (Path(folder) / "generation_config.json").write_text(json.dumps(self._settings))


@pytest.mark.parametrize(
    ("before", "after"), [(1, [1, 7]), ([1], [1, 7]), (None, [1, 7]), ([7, 1], [7, 1]), ([2, 1], [2, 1, 7])]
)
def test_the_ends_of_training_are_those_of_generation(before: Any, after: list[int], tmp_path: Path) -> None:
    policy: Any = Policy({"eos_token_id": before, "temperature": 0.6})
    folder = write_model(RunFiles(tmp_path), policy, ModelExtras("a template", (1, 7)))
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"eos_token_id": after, "temperature": 0.6}


@pytest.mark.parametrize("before", [1, [1, 3], None, [7, 1]])
def test_ends_that_replaced_those_of_the_model_in_the_run_replace_them_in_its_model(
    before: Any, tmp_path: Path
) -> None:
    policy: Any = Policy({"eos_token_id": before})
    folder = write_model(RunFiles(tmp_path), policy, ModelExtras(None, (7, 9, 7), ends_alone=True))
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [7, 9]}


def test_nothing_is_written_where_nothing_is_missing(tmp_path: Path) -> None:
    content = b'{"eos_token_id":   7}'
    assert write_ends(content, (7, None)) == content
    assert write_ends(content, (7,), alone=True) == content
    policy: Any = Policy(None)
    assert [*write_model(RunFiles(tmp_path), policy, ModelExtras(None, (1, 7))).iterdir()] == []


@pytest.mark.parametrize("template", [CHATML, None, "{{ raise_exception('never') }}"])
def test_an_exported_model_ends_as_its_template_does(template: str | None, tmp_path: Path) -> None:
    tokenizer = char_tokenizer(ALPHABET, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})  # type: ignore[arg-type]
    tokenizer.save_pretrained(str(tmp_path))
    _write_ends(RunFiles(tmp_path.parent), tmp_path.name)  # adapters, which have no such file
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    _write_ends(RunFiles(tmp_path.parent), tmp_path.name)
    ids = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids == ([tokenizer.eos_token_id, end] if template == CHATML else tokenizer.eos_token_id)


def test_an_exported_model_ends_with_the_stop_tokens_of_the_run(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})  # type: ignore[arg-type]
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    _write_ends(RunFiles(tmp_path.parent), tmp_path.name, (5, "<|im_end|>", "</answer>"))
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert settings == {"eos_token_id": [5, end]}, "they replace the model's, and a text is no token"
    _write_ends(RunFiles(tmp_path.parent), tmp_path.name, ("</answer>",))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": [5, end, tokenizer.eos_token_id]
    }, "texts are added to the end tokens"
