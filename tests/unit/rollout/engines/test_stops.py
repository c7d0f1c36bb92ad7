"""Texts that end completions: where they end, and what stays of tokens and of texts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from podium.data import Batch
from podium.errors import ConfigError
from podium.models import ModelConfig, char_tokenizer
from podium.rollout.engines.stops import Watch, before_stop, count_to_stop, cut_completion, find_stop
from podium.rollout.sampling import Completion, KeptSet, RequestParams, SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer import build_config
from podium.trainer.checks import preflight

WORDS = ["</", "ans", "wer>", "a", "\n", "\n\n", "é", "stop", "s"]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[id] for id in ids)


@pytest.mark.parametrize(
    ("ids", "stops", "count", "stop"),
    [
        ([3, 0, 1, 2, 3], ["</answer>"], 4, "</answer>"),  # across tokens
        ([3, 7, 3], ["to"], 2, "to"),  # within a token
        ([3, 5, 3], ["\n", "\n\n"], 2, "\n\n"),  # of two at one place the longer
        ([3, 7, 4], ["\n", "top"], 2, "top"),  # of several the first
        ([3, 3], ["b"], None, ""),
        ([0, 1], ["</answer>"], None, ""),  # a beginning alone
        ([], ["b"], None, ""),
        ([6, 3], ["éa"], 2, "éa"),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_text(
    ids: list[int], stops: list[str], count: int | None, stop: str
) -> None:
    assert count_to_stop(ids, stops, decode) == count
    length = len(ids)
    kept = KeptSet(torch.arange(2 * length), torch.arange(0, 2 * length + 1, 2))
    logprobs, versions = torch.rand(length), torch.arange(length)
    whole = Completion(torch.tensor(ids, dtype=torch.int64), logprobs, "length", versions, kept, [b""] * length)
    cut = cut_completion(whole, stops, decode)
    if count is None:
        assert cut is whole and cut.stop == ""
        return
    assert (cut.token_ids.tolist(), cut.finish_reason, cut.stop) == (ids[:count], "stop", stop)
    assert cut.logprobs.tolist() == logprobs[:count].tolist() and cut.versions.tolist() == versions[:count].tolist()
    assert cut.kept is not None and cut.kept.at(count - 1).tolist() == kept.at(count - 1).tolist()
    assert len(cut.kept.offsets) == count + 1 and len(cut.masks or ()) == count
    assert before_stop(decode(ids[:count]), stops) + stop in decode(ids)


@pytest.mark.parametrize("together", [1, 3, 8])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_watch_sees_a_text_in_chunks_of_any_size(together: int, chunk: int) -> None:
    ids = [3] * 7 + [0, 1, 2] + [3] * 20
    watch = Watch(["</answer>", "zz"], decode, (), together)
    seen = [watch.add(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    first = seen.index(True) * chunk
    assert 9 - chunk < first <= 10 + together + chunk
    assert all(seen[first // chunk :]) and watch.count_beyond() >= 0


def test_a_watch_goes_on_after_what_another_engine_drew() -> None:
    assert Watch(["</answer>"], decode, [3, 0, 1], 1).add([2])


def test_of_several_the_first_in_the_text_counts() -> None:
    assert find_stop("a\nstop", ["stop", "\n"]) == "\n"
    assert find_stop("a", ["stop"]) == ""


def test_texts_of_the_settings_are_for_engines_and_special_tokens_are_tokens() -> None:
    tokenizer = char_tokenizer("abc<>/\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})  # pyright: ignore[reportArgumentType] - it takes a list
    model = ModelConfig(config={"model_type": "qwen3", "vocab_size": len(tokenizer)}, tokenizer="chars:abc<>/\n")
    sampling = build_config(SamplingParams, {"max_new_tokens": 4, "stop_token_ids": ["</a>", "<|end|>", 1]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "check_vocabulary", lambda *_: None)
        params = preflight.with_stop_tokens(sampling, model, tokenizer, DataConfig())
        texts = preflight.with_stop_tokens(
            SamplingParams(max_new_tokens=4, stop_token_ids=("</a>",)),  # type: ignore[arg-type] - a text is a setting
            model,
            tokenizer,
            DataConfig(),
        )
    assert isinstance(params, RequestParams)
    assert params.stop == ("</a>",)
    assert params.stop_token_ids == (tokenizer.convert_tokens_to_ids("<|end|>"), 1)
    assert texts.stop_token_ids == (tokenizer.eos_token_id,), "texts come beside the tokens that end a text"


def test_a_text_is_not_empty() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        build_config(SamplingParams, {"max_new_tokens": 4, "stop_token_ids": [""]})


def test_a_batch_is_no_list_of_texts() -> None:
    assert len(Batch({"stop_text": ["a", ""]})) == 2
