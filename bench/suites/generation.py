"""The native engine beside transformers' `generate`: same weights, prompts, lengths, sampling and threads.

The engine also returns the log-probability of each token, which `generate` does not; its time is within the figure.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.context import Context
from bench.floors import decode_rate
from bench.measure import Row, alternate, compare
from bench.workload import SHAPES
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams

GROUP = 8  # completions a prompt
PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shape: str
    batch: int
    dtype: torch.dtype = torch.float32
    new_tokens: int = 64

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens


CASES = (
    Case(name="generate_1m_b128", shape="1m", batch=128),
    Case(name="generate_1m_b16", shape="1m", batch=16),
    Case(name="generate_10m_b128", shape="10m", batch=128),
    Case(name="generate_10m_bf16_b128", shape="10m", batch=128, dtype=torch.bfloat16),
    # Fewer tokens: a token costs the same, and the suite stays within minutes.
    Case(name="generate_100m_b128", shape="100m", batch=128, new_tokens=16),
    Case(name="generate_100m_bf16_b128", shape="100m", batch=128, dtype=torch.bfloat16, new_tokens=16),
)


def generate(context: Context) -> Iterator[Row]:
    """Completion tokens a second."""
    for case in CASES[:2] if context.quick else CASES:
        prompts = random_prompts(case)
        subjects = {
            "podium": native_subject(case, prompts),
            "transformers": transformers_subject(case, prompts),
            "products": partial(decode_rate, SHAPES[case.shape], case.batch, case.dtype),
        }
        thorough = 7 if case.shape == "1m" else 5
        figures = alternate(subjects, repetitions=context.repetitions(thorough))
        floor = "products: the matrix products of its tokens alone, at the rate measured for this width and batch"
        yield compare(case.name, figures, unit="tokens/s", better="higher", floor=floor)


def random_prompts(case: Case) -> list[list[int]]:
    source = random.Random(0)
    vocabulary = SHAPES[case.shape].vocabulary
    return [[source.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(case.batch // GROUP)]


def build(case: Case) -> PreTrainedModel:
    """The same weights each time; an engine may rearrange its model's storage, so each subject has its own."""
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPES[case.shape].config()))
    return model.to(case.dtype).eval()  # to() is typed by its decorators as something else


def native_subject(case: Case, prompts: list[list[int]]) -> Callable[[], float]:
    engine = make_engine(EngineConfig(name="native", max_sequences=case.batch), build(case))
    params = SamplingParams(max_new_tokens=case.new_tokens, n=GROUP)
    rounds = itertools.count()

    def tokens_per_s() -> float:
        first = next(rounds) * case.batch
        seeds = list(range(first, first + case.batch))
        started = time.perf_counter()
        completions = engine.generate(prompts, params, seeds)
        seconds = time.perf_counter() - started
        expect(case, sum(len(completion.token_ids) for completion in completions))
        return case.tokens / seconds

    return tokens_per_s


def transformers_subject(case: Case, prompts: list[list[int]]) -> Callable[[], float]:
    model: Any = build(case)  # generate() is typed by its decorators as something else
    prompts_PT = torch.tensor(prompts)
    mask_PT = torch.ones_like(prompts_PT)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=case.new_tokens,
        num_return_sequences=GROUP,
        pad_token_id=0,
    )

    def tokens_per_s() -> float:
        started = time.perf_counter()
        output_CT = model.generate(prompts_PT, attention_mask=mask_PT, generation_config=config)
        seconds = time.perf_counter() - started
        expect(case, output_CT.shape[0] * (output_CT.shape[1] - PROMPT_TOKENS))
        return case.tokens / seconds

    return tokens_per_s


def expect(case: Case, tokens: int) -> None:
    if tokens != case.tokens:
        raise AssertionError(f"{case.name}: {tokens} tokens came back, {case.tokens} were asked for")
