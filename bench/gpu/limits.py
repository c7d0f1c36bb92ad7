"""How fast the engine decodes at each number of rows, and how long a row may be before memory ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from bench.gpu.clock import reset_peak, wall_s
from bench.gpu.numerics import random_rows
from bench.gpu.shapes import TOKENIZER, model_config
from bench.gpu.stage import Stage
from podium.algorithms import TokenLoss
from podium.devices import memory_peak_bytes
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.workers import ModelConfig, OptimConfig, ParallelConfig, TrainEngine, load_model
from podium.workers.micro_batches import MicroBatch
from podium.workers.scoring import score_tokens

PROMPT_TOKENS = 64
MARGIN_S = 3.0
GIB = 2**30


def decode(stage: Stage) -> None:
    """Tokens a second of the native engine in bf16 at 1 to 512 rows, with CUDA graphs and without."""
    batches, new_tokens = ((1, 4), 4) if stage.dry else ((1, 8, 32, 128, 512), 64)
    config = ModelConfig(config=model_config(stage), tokenizer=TOKENIZER, dtype="bfloat16")
    model = load_model(config, stage.device).requires_grad_(False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    stage.figure("weights", weights / 1e9, "GB, read once a token of all rows")
    for name, settings in ways(stage).items():
        engine = make_engine(EngineConfig(name="native", max_sequences=max(batches), **settings), model)
        engine.refresh(0)
        for rows in batches:

            def rate(rows: int = rows, engine: Any = engine, name: str = name) -> None:
                seconds = _decode_s(stage, engine, rows, new_tokens)
                stage.figure(f"{name}_{rows}", rows * new_tokens / seconds, "tokens/s")

            stage.part(f"{name}_{rows}", rate)
        del engine


def ways(stage: Stage) -> dict[str, dict[str, Any]]:
    """Settings of the engine, by name: without CUDA graphs and, where this version has them and a device, with."""
    key = next((one.name for one in fields(EngineConfig) if "graph" in one.name), None)
    if key is None:
        stage.leave_out("graphs", "this version's engine has no CUDA graphs")
        return {"plain": {}}
    if not stage.on_gpu:
        stage.leave_out("graphs", "no CUDA device")
        return {"plain": {key: False}}
    return {"plain": {key: False}, "graphs": {key: True}}


def longest_row(stage: Stage) -> None:
    """The longest packed row that one optimizer step takes before memory ends, with gradient checkpointing."""
    config = ModelConfig(
        config={**model_config(stage), "max_position_embeddings": 1 << 21}, tokenizer=TOKENIZER, dtype="bfloat16",
        gradient_checkpointing=True,
    )  # fmt: skip
    engine = TrainEngine(
        load_model(config, stage.device), optim=OptimConfig(lr=1e-6), device=stage.device,
        parallel=ParallelConfig(micro_batch_tokens=1 << 24),
    )  # fmt: skip
    first, most = (64, 256) if stage.dry else (8192, 1 << 20)
    words = config.config["vocab_size"]

    took = 0.0

    def attempt(tokens: int) -> bool:
        nonlocal took
        if 4 * took > stage.left_s - MARGIN_S:  # attention's time grows with the square of the row
            stage.fact("time ended", f"before a row of {tokens} tokens, whose step may take {4 * took:.0f} s")
            return False
        reset_peak(stage.device)
        batch = random_rows((tokens + 1,), words)

        def loss(micro: MicroBatch) -> TokenLoss:
            return TokenLoss(-score_tokens(engine.model, batch, micro).logprobs)

        try:
            took = wall_s(lambda: engine.step(batch, loss), stage.device)
        except torch.OutOfMemoryError:
            stage.fact("memory ended", f"at a row of {tokens} tokens")
            return False
        stage.figure(f"step_{tokens}", took, "s")
        if stage.on_gpu:
            stage.figure(f"peak_{tokens}", memory_peak_bytes(stage.device) / GIB, "GiB")
        stage.figure("longest", tokens, "tokens")
        return True

    if longest(attempt, first, most) is None:
        stage.failures.append(f"a row of {first} tokens does not fit")


def longest(attempt: Callable[[int], bool], first: int, most: int) -> int | None:
    """Return the largest of ``first``, twice ``first``, …, ``most`` that succeeds, refined by one half step; None if
    ``first`` fails. Larger ones than one that fails are not tried."""
    best = None
    size = first
    while size <= most:
        if not attempt(size):
            between = size * 3 // 4
            return between if best is not None and attempt(between) else best
        best, size = size, size * 2
    return best


def _decode_s(stage: Stage, engine: Any, rows: int, new_tokens: int) -> float:
    """Seconds of the second of two generations, prompts included."""
    source = random.Random(rows)
    words = model_config(stage)["vocab_size"]
    prompts = [[source.randrange(4, words) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    params = SamplingParams(max_new_tokens=new_tokens)
    engine.generate(prompts, params, range(rows))
    return wall_s(lambda: engine.generate(prompts, params, range(rows)), stage.device)
