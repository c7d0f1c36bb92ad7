"""What the native engine computes for a text does not depend on the lengths of the texts beside it, bit by bit."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium_native.cache import GemmCache
from podium_native.decoder import Decoder, Past, Prefill
from podium_native.parameters import read_weights

LENGTHS = [7, 33, 128, 129, 300, 16, 400, 700, 1000, 257]
POSITIONS = 1056


def make_long_model(window: int | None = None, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, initializer_range=0.3,
    )  # fmt: skip
    if window is not None:
        config.model_type, config.sliding_window = "mistral", window  # read by the engine, not by the model
    return LlamaForCausalLM(config).eval()


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    longest = torch.randint(97, (max(LENGTHS),), generator=generator).tolist()
    return [longest[:length] for length in LENGTHS]


@torch.inference_mode()
def make_decoder(window: int | None = None) -> Decoder:
    decoder = Decoder(read_weights(make_long_model(window)))
    decoder.reserve(POSITIONS)
    return decoder


def cut(prefill: Prefill, row: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    return prefill.keys[:, row, :, :length], prefill.values[:, row, :, :length], prefill.logits_PV[row]


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 24, 500])
def test_a_prompt_does_not_depend_on_those_beside_it(window: int | None) -> None:
    decoder, prompts = make_decoder(window), make_prompts()
    alone = [cut(decoder.prefill([prompt]), 0, len(prompt)) for prompt in prompts]
    for order in ([*range(len(prompts))], [8, 1], [4, 6, 0], [5, 2, 9]):
        together = decoder.prefill([prompts[index] for index in order])
        for row, index in enumerate(order):
            for mine, expected in zip(cut(together, row, LENGTHS[index]), alone[index], strict=True):
                assert torch.equal(mine, expected), (order, index)
    longest = alone[LENGTHS.index(max(LENGTHS))]
    for index, length in enumerate(LENGTHS):  # all begin alike: what follows a position is not in its keys and values
        assert torch.equal(alone[index][0], longest[0][:, :, :length])
        assert torch.equal(alone[index][1], longest[1][:, :, :length])


@pytest.mark.each_value
@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 24, 500])
@pytest.mark.parametrize("known", [1, 100, 255, 256, 399])
def test_a_prompt_goes_on_from_what_another_computed(known: int, window: int | None) -> None:
    decoder, prompts = make_decoder(window), [prompt for prompt in make_prompts() if len(prompt) >= 400]
    expected = decoder.prefill(prompts)
    other = decoder.prefill([prompt[:known] for prompt in prompts])
    lengths = [known, known // 2, known]
    went_on = decoder.prefill(prompts, Past(other.keys, other.values, lengths))
    for row, prompt in enumerate(prompts):
        for mine, right in zip(cut(went_on, row, len(prompt)), cut(expected, row, len(prompt)), strict=True):
            assert torch.equal(mine, right), row


@torch.inference_mode()
def test_no_prompt_has_new_tokens_where_others_begin_later() -> None:
    decoder, prompts = make_decoder(), [prompt for prompt in make_prompts() if len(prompt) in (33, 1000)]
    expected = decoder.prefill(prompts)
    went_on = decoder.prefill(prompts, Past(expected.keys[:, :, :, :700], expected.values[:, :, :, :700], [0, 700]))
    for row, prompt in enumerate(prompts):
        for mine, right in zip(cut(went_on, row, len(prompt)), cut(expected, row, len(prompt)), strict=True):
            assert torch.equal(mine, right), row


@pytest.mark.everyday("14-2-32", "4-2-16", "16-1-8")
@torch.inference_mode()
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 64), (9, 3, 64), (4, 2, 16), (14, 2, 32), (16, 1, 8)])
def test_a_lane_does_not_depend_on_the_longest(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(0)
    shape = SimpleNamespace(layers=[SimpleNamespace(window=None)], heads=heads, kv_heads=kv_heads, head_dim=dim,
                            device=torch.device("cpu"), dtype=torch.float32)  # fmt: skip
    cache = GemmCache(cast("Any", shape), 32, 1536)
    cache.keys_by_time.normal_()
    cache.values.normal_()
    query, key, value = torch.randn(32, heads, dim), torch.randn(32, kv_heads, dim), torch.randn(32, kv_heads, dim)

    def attend(lanes: int, until: int) -> Tensor:
        positions = torch.full((lanes,), position)
        return cache.span(positions, until)(0, query[:lanes], key[:lanes], value[:lanes])[:16]

    for position in (20, 255, 256, 300, 390, 700):
        alone = attend(16, position + 1)
        for until in range(position + 1, 1536, 112):
            assert torch.equal(attend(16, until), alone), (position, until)
            assert torch.equal(attend(32, until), alone), (position, until)


@pytest.mark.parametrize("length", [380, 600])
def test_a_long_completion_does_not_depend_on_its_batch(length: int) -> None:
    engine = make_engine(EngineConfig(name="native"), make_long_model(layers=1))
    prompts = [prompt for prompt in make_prompts() if len(prompt) < length]
    params, seeds = SamplingParams(max_new_tokens=40), list(range(len(prompts)))
    together = engine.generate(prompts, params, seeds)
    for prompt, seed, mine in zip(prompts, seeds, together, strict=True):
        (alone,) = engine.generate([prompt], params, [seed])
        assert torch.equal(mine.token_ids, alone.token_ids)
        assert torch.equal(mine.logprobs, alone.logprobs)
