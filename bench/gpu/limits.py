"""How fast the engine decodes at each number of rows, and how long a row may be before memory ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from bench.gpu.clock import reset_peak, wall_s
from bench.gpu.numerics import random_rows
from bench.gpu.shapes import TINY, TOKENIZER, model_config
from bench.gpu.stage import Stage
from podium.algorithms import TokenLoss
from podium.data import Batch
from podium.devices import memory_peak_bytes
from podium.models import ModelConfig, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.engine_lookup import engine_class
from podium.rollout.sampling import SamplingParams
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.micro_batches import MicroBatch
from podium.training.scoring import score_tokens

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


def graphs(stage: Stage) -> None:
    """CUDA graphs against the loop: the same tokens and log-probabilities, and the time of a token."""
    stage.part("changes", lambda: _graphs_after_changes(stage))
    config = ModelConfig(config=model_config(stage), tokenizer=TOKENIZER, dtype="bfloat16")
    model = load_model(config, stage.device).requires_grad_(False)
    engines = [_native(model, graphs=on) for on in (False, True)]
    new_tokens = 4 if stage.dry else 64
    for rows in (1, 4) if stage.dry else (1, 32, 256):
        loop, replayed = (_decode_s(stage, engine, rows, new_tokens) for engine in engines)
        stage.figure(f"loop_{rows}", loop / new_tokens * 1e3, "ms a token of all rows")
        stage.figure(f"graphs_{rows}", replayed / new_tokens * 1e3, "ms a token of all rows")
        stage.figure(f"times_{rows}", loop / replayed, "times the loop's speed")
    gap, unlike = _apart(engines, SamplingParams(max_new_tokens=new_tokens), 3 if stage.dry else 37)
    stage.expect("bfloat16", gap, 0.1, "nats from the loop, as long as the tokens are the same")
    stage.figure("unlike", unlike, "of the completions in bfloat16 differ somewhere, where rounding moves a draw")


def _graphs_after_changes(stage: Stage) -> None:
    """Draw by both from equal models in float32, after their weights changed in place, and after these moved."""
    config = ModelConfig(config=TINY, tokenizer=TOKENIZER, dtype="float32")
    models = [load_model(config, stage.device).requires_grad_(False) for _ in range(2)]
    engines = [_native(model, graphs=on) for model, on in zip(models, (False, True), strict=True)]
    rows, new_tokens = (3, 4) if stage.dry else (37, 24)  # 37 rows are padded to 48, and by and by to fewer
    for change in ("at_first", "in_place", "moved"):
        for parameter in (parameter for model in models for parameter in model.parameters()):
            if change == "in_place":
                parameter.mul_(1.01)
            elif change == "moved":
                parameter.data = parameter.data.clone()
        for engine in engines:
            engine.refresh(engine.version + 1)
        for draw, top_k in (("all", 0), ("kept", 8)):
            gap, unlike = _apart(engines, SamplingParams(max_new_tokens=new_tokens, top_k=top_k), rows)
            stage.expect(f"{change}_{draw}", gap, 1e-4, "nats from the loop")
            stage.expect(f"{change}_{draw}_unlike", unlike, 0.0, "of the completions differ somewhere")


def _native(model: Any, *, graphs: bool) -> Any:
    engine = make_engine(EngineConfig(name="native", options={"cuda_graphs": graphs}), model)
    engine.refresh(0)
    return engine


def _apart(engines: Sequence[Any], params: SamplingParams, rows: int) -> tuple[float, float]:
    """How far the log-probabilities of equal tokens are apart, and what share of the completions is not equal."""
    prompts = [[4 + (row * 7 + at) % 90 for at in range(3 + row % 5)] for row in range(rows)]
    worst, unlike = 0.0, 0
    for one, other in zip(*(engine.generate(prompts, params, range(rows)) for engine in engines), strict=True):
        same = int((one.token_ids == other.token_ids).long().cumprod(0).sum())
        unlike += same < len(one.token_ids)
        worst = max(worst, 0.0, *(one.logprobs - other.logprobs)[:same].abs().tolist())
    return worst, unlike / rows


def ways(stage: Stage) -> dict[str, dict[str, Any]]:
    """Settings of the engine, by name: without CUDA graphs and, where this version has them and a device, with."""
    options = engine_class("native").options
    own = [one.name for one in fields(EngineConfig)], [one.name for one in fields(options)] if options else []
    key, option = (next((name for name in names if "graph" in name), None) for names in own)
    if key is None and option is None:
        stage.leave_out("graphs", "this version's engine has no CUDA graphs")
        return {"plain": {}}

    def setting(on: bool) -> dict[str, Any]:
        return {key: on} if key else {"options": {option: on}}

    if not stage.on_gpu:
        stage.leave_out("graphs", "no CUDA device")
        return {"plain": setting(False)}
    return {"plain": setting(False), "graphs": setting(True)}


def sleep(stage: Stage) -> None:
    """Weights and optimizer leave the device and come back: how much it frees, how long it takes, and equal losses."""
    config = ModelConfig(config=model_config(stage), tokenizer=TOKENIZER)
    batch = random_rows((33,) * 4 if stage.dry else (513,) * 8, config.config["vocab_size"])
    losses: dict[str, list[float]] = {}
    for offload in ("none", "all"):
        parallel = ParallelConfig(offload=offload)
        engine = TrainEngine(
            load_model(config, stage.device), optim=OptimConfig(lr=1e-4), parallel=parallel, device=stage.device
        )
        losses[offload] = [engine.step(batch, _cross_entropy(engine, batch)).loss for _ in range(2)]
        if offload == "all":
            with engine.awake():
                reset_peak(stage.device)
                awake = memory_peak_bytes(stage.device)
            engine.rest()
            reset_peak(stage.device)
            if stage.on_gpu:
                stage.figure("freed", (awake - memory_peak_bytes(stage.device)) / GIB, "GiB")
            stage.figure("there_and_back", wall_s(lambda e=engine: _wake(e), stage.device), "s to the device and back")
        del engine
    worst = max(abs(one - other) for one, other in zip(losses["all"], losses["none"], strict=True))
    stage.expect("loss", worst, 1e-3 if stage.on_gpu else 0.0, "nats from an engine that stays")


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
        try:
            took = wall_s(lambda: engine.step(batch, _cross_entropy(engine, batch)), stage.device)
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


def _cross_entropy(engine: TrainEngine, batch: Batch) -> Callable[[MicroBatch], TokenLoss]:
    return lambda micro: TokenLoss(-score_tokens(engine.model, batch, micro).logprobs)


def _wake(engine: TrainEngine) -> None:
    with engine.awake():
        pass


def _decode_s(stage: Stage, engine: Any, rows: int, new_tokens: int) -> float:
    """Seconds of the second of two generations, prompts included."""
    prompts = make_prompts(stage, rows)
    params = SamplingParams(max_new_tokens=new_tokens)
    engine.generate(prompts, params, range(rows))
    return wall_s(lambda: engine.generate(prompts, params, range(rows)), stage.device)


def make_prompts(stage: Stage, rows: int) -> list[list[int]]:
    """Return so many prompts of random words, no two of which begin alike."""
    source = random.Random(rows)
    words = model_config(stage)["vocab_size"]
    return [[source.randrange(4, words) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
