"""The native engine beside transformers' `generate` and vLLM's build for CPUs.

All have the same model, prompts, lengths, sampling and threads.

The engine also returns the log-probability of each token, which the others are not asked for; its time is within the
figure. `podium` draws a few rows as `podium serve` does, so that their rounding may depend on what else is drawn, and
`podium_exact` as a trainer does; of more rows both are the same. vLLM runs in a process and an environment of its own,
with as many threads as torch has here.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.context import Context
from bench.floors import decode_rate
from bench.measure import Row, alternate, compare
from bench.peer import PeerClient, peer_command, start_peer
from bench.workload import SHAPES
from podium.devices import has_bfloat16_unit
from podium.rollout.engines import EngineConfig, Finished, Request, make_engine
from podium.rollout.sampling import SamplingParams

GROUP = 8  # completions a prompt, or all where there are fewer
PROMPT_TOKENS = 16
NARROW = 4  # rows up to which the engine is faster if the completions need not be exact
FLOOR = "products: the matrix products of its tokens alone, at the rate measured for this width and batch"


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shape: str
    batch: int
    dtype: torch.dtype = torch.float32
    new_tokens: int = 64
    repetitions: int = 5

    @property
    def group(self) -> int:
        return min(GROUP, self.batch)

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens


SMALL = (
    Case(name="generate_1m_b128", shape="1m", batch=128, repetitions=7),
    Case(name="generate_1m_b16", shape="1m", batch=16, repetitions=7),
    Case(name="generate_10m_b128", shape="10m", batch=128),
)
# Fewer tokens: a token costs the same, and the suite stays within minutes.
REAL = (
    Case(name="generate_135m_b1", shape="135m", batch=1, new_tokens=32),
    Case(name="generate_135m_b4", shape="135m", batch=4, new_tokens=32),
    Case(name="generate_135m_b16", shape="135m", batch=16, new_tokens=32),
    Case(name="generate_135m_b32", shape="135m", batch=32, new_tokens=32, repetitions=3),
    Case(name="generate_135m_b128", shape="135m", batch=128, new_tokens=16, repetitions=3),
)
REAL_BFLOAT16 = (
    Case(name="generate_135m_bf16_b128", shape="135m", batch=128, dtype=torch.bfloat16, new_tokens=16, repetitions=3),
)
"""Measured where the processor has a unit for such products. Elsewhere nobody would choose them."""


def generate(context: Context) -> Iterator[Row]:
    """Completion tokens a second of small models."""
    for case in SMALL[:2] if context.quick else SMALL:
        yield row_of(context, case, {})


def generate_135m(context: Context) -> Iterator[Row]:
    """The same of a model with the sizes of SmolLM2-135M, from one row to many."""
    for cases in (REAL, REAL_BFLOAT16):
        if cases is REAL_BFLOAT16 and not has_bfloat16_unit():
            context.say("generation in bfloat16 is left out: this processor has no unit for it")
            continue
        with vllm_process(context, cases) as peers:
            for case in cases:
                if context.quick and cases is REAL and case.batch > 16:
                    continue
                yield row_of(context, case, peers)


def row_of(context: Context, case: Case, peers: dict[str, PeerClient]) -> Row:
    """The row of a case. Each subject has its own copy of the model."""
    prompts = random_prompts(case)
    load = {"prompts": prompts, "group": case.group, "new_tokens": case.new_tokens}
    subjects = {
        "podium": native_subject(case, prompts, exact=case.batch > NARROW),
        **({"podium_exact": native_subject(case, prompts)} if case.batch <= NARROW else {}),
        "transformers": transformers_subject(case, prompts),
        **{name: partial(peer_rate, peer, case, load) for name, peer in peers.items()},
        "products": partial(decode_rate, SHAPES[case.shape], case.batch, case.dtype),
    }
    figures = alternate(subjects, repetitions=context.repetitions(case.repetitions, 2))
    return compare(case.name, figures, unit="tokens/s", better="higher", floor=FLOOR)


@contextmanager
def vllm_process(context: Context, cases: Sequence[Case]) -> Iterator[dict[str, PeerClient]]:
    """vLLM with the model of these cases, where it is installed."""
    python = context.peer_python("vllm")
    if python is None:
        yield {}
        return
    threads = torch.get_num_threads()
    environment = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        tempfile.TemporaryDirectory(prefix="podium-bench-") as folder,
        start_peer(peer_command(python, "vllm_generate"), context.log_of("vllm"), environment=environment) as peer,
    ):
        config = Qwen3Config(**SHAPES[cases[0].shape].config())
        config.architectures = [Qwen3ForCausalLM.__name__]
        config.save_pretrained(folder)
        dtype, sequences = str(cases[0].dtype).removeprefix("torch."), max(case.batch for case in cases)
        used = peer.call("open", folder=folder, dtype=dtype, sequences=sequences)
        if used != threads:
            raise AssertionError(f"vLLM computes with {used} threads, the others with {threads}")
        yield {"vllm": peer}


def peer_rate(peer: PeerClient, case: Case, load: dict[str, Any]) -> float:
    """Tokens a second as the peer's process took them, without the message."""
    told = peer.call("generate", **load)
    expect(case, told["tokens"])
    return case.tokens / told["seconds"]


def random_prompts(case: Case) -> list[list[int]]:
    source = random.Random(0)
    vocabulary = SHAPES[case.shape].vocabulary
    return [[source.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(case.batch // case.group)]


def build(case: Case) -> PreTrainedModel:
    """The same weights each time; an engine may rearrange its model's storage, so each subject has its own."""
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPES[case.shape].config()))
    return model.to(case.dtype).eval()  # to() is typed by its decorators as something else


def native_subject(case: Case, prompts: list[list[int]], *, exact: bool = True) -> Callable[[], float]:
    """Podium's engine, of which a trainer asks for ``exact`` completions and `podium serve` for others."""
    engine = make_engine(EngineConfig(name="native", max_sequences=case.batch), build(case))
    params = SamplingParams(max_new_tokens=case.new_tokens)
    rounds = itertools.count()

    def tokens_per_s() -> float:
        first = next(rounds) * case.batch
        requests = [
            Request(id=seed, prompt=prompts[row // case.group], params=params, seed=seed, exact=exact)
            for row, seed in enumerate(range(first, first + case.batch))
        ]
        started = time.perf_counter()
        engine.submit(*requests)
        tokens = 0
        while events := engine.poll():
            tokens += sum(len(event.completion.token_ids) for event in events if isinstance(event, Finished))
        seconds = time.perf_counter() - started
        expect(case, tokens)
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
        num_return_sequences=case.group,
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
