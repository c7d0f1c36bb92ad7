"""A written reward model scores texts where training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from podium.data import Batch, Jagged
from podium.errors import CheckpointError, DataError
from podium.models import ModelConfig
from podium.models.tokenizers import char_tokenizer
from podium.training import OptimConfig
from podium.workers.reward_model import load_scorer_encoder
from podium_preferences.scorer import Scorer
from podium_preferences.written_scorer import name_padding
from tests.unit.workers.tiny import TINY

PAD, EOS = 0, 2
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% else %}{{ eos_token }}{% endif %}"
)


def make_scorer(folder: Path, padding: int | None, tokenizer_padding: str | None = None, template: str = "") -> Scorer:
    """A reward model with a random head, and a tokenizer whose conversations end with the token EOS."""
    tokenizer = char_tokenizer("0123456789+=ua:\n ", chat_template=template or TEMPLATE)
    if tokenizer_padding is not None:
        tokenizer.pad_token = tokenizer_padding
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    shape = {**TINY.config, "pad_token_id": padding}
    scorer = Scorer(ModelConfig(config=shape, tokenizer=str(folder / "tokenizer")), OptimConfig(lr=0.0))
    with torch.no_grad():
        head: Any = scorer.model.lm_head
        head.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(1)))
    return scorer


def encode(folder: Path) -> list[list[int]]:
    encoder = load_scorer_encoder(str(folder / "tokenizer"), "")
    return [
        encoder.encode_answer(
            [{"role": "user", "content": prompt}], [{"role": "assistant", "content": text}], prompt + text, None
        )
        for prompt, text in (("1+2=", "3"), ("1+2=", "4"), ("7+5=", "12"))
    ]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("padding", "tokenizer_padding", "written"),
    [(PAD, None, PAD), (EOS, None, PAD), (EOS, "<eos>", None), (None, None, None), (1, "<eos>", 1)],
)
def test_a_written_reward_model_scores_a_text_at_its_last_token(
    tmp_path: Path, padding: int | None, tokenizer_padding: str | None, written: int | None
) -> None:
    scorer, rows = make_scorer(tmp_path, padding, tokenizer_padding), encode(tmp_path)
    assert {row[-1] for row in rows} == {EOS}
    tokens = Jagged.from_rows([torch.tensor(row) for row in rows])
    scores = scorer.answer_values(Batch({"tokens": tokens})).dense("answer_values")
    (tmp_path / "model").mkdir()
    scorer.save_pretrained(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["pad_token_id"] == written
    loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        alone = torch.cat([loaded.eval()(input_ids=torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(alone.double(), scores, atol=1e-5, rtol=0)


def test_a_template_whose_texts_end_with_the_padding_token_gets_another(tmp_path: Path) -> None:
    """The end of the conversation is no end of a text for the model."""
    template = TEMPLATE.replace("{{ eos_token }}", "{{ bos_token }}")
    bos = char_tokenizer("1").bos_token_id
    scorer = make_scorer(tmp_path, cast("int", bos), template=template)
    assert encode(tmp_path)[0][-1] == bos
    (tmp_path / "model").mkdir()
    scorer.save_pretrained(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["pad_token_id"] == PAD


def test_a_text_that_ends_with_the_padding_token_is_refused(tmp_path: Path) -> None:
    scorer = make_scorer(tmp_path, PAD)
    tokens = Jagged.from_rows([torch.tensor([5, 6, EOS]), torch.tensor([5, 6, PAD])])
    with pytest.raises(DataError, match="ends with token 0, which the written reward model takes for padding"):
        scorer.answer_values(Batch({"tokens": tokens}))


def test_a_classifier_that_scores_in_another_way_is_found_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = make_scorer(tmp_path, EOS)
    folder = tmp_path / "model"
    folder.mkdir()

    def spoil(_model: Any, config: Any, _padding: Any) -> Any:
        return {**config, "pad_token_id": EOS}

    with monkeypatch.context() as patch:
        patch.setattr("podium_preferences.scorer.name_padding", spoil)
        with pytest.raises(CheckpointError, match="one token too early, because they end with its padding token 2"):
            scorer.save_pretrained(str(folder))
    _, theirs = scorer._head
    with monkeypatch.context() as patch:
        patch.setattr(scorer, "_head", ("lm_head.weight", f"{theirs}.other"))
        scorer.__dict__.pop("_layout", None)
        with pytest.raises(CheckpointError, match="cannot be used"):
            scorer.save_pretrained(str(folder))


def test_the_part_of_the_language_model_gets_the_padding_token_too() -> None:
    config: Any = transformers.AutoConfig.for_model("gemma3", text_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        text: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("gemma3_text", num_hidden_layers=1)
        )
    text.config = config
    named = name_padding(text, config.to_dict(), 7)
    assert named["pad_token_id"] == named["text_config"]["pad_token_id"] == 7
    assert named["vision_config"] == config.to_dict()["vision_config"]
