"""Where the time of a decode step and of an optimizer step goes on the device, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.gpu.clock import wall_s
from bench.gpu.limits import make_prompts
from bench.gpu.numerics import random_rows
from bench.gpu.shapes import TOKENIZER, model_config
from bench.gpu.stage import Stage
from bench.workload import SHAPES
from podium.algorithms import TokenLoss
from podium.models import ModelConfig, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.scoring import score_tokens

MOST_KERNELS = 14
ROW_TOKENS = 320


def decode_kernels(stage: Stage) -> None:
    """The kernels of decode steps of many rows, with CUDA graphs and without."""
    rows, new_tokens = (4, 4) if stage.dry else (256, 32)
    model = load_model(_config(stage, dtype="bfloat16"), stage.device).requires_grad_(False)
    for name, graphs in (("loop", False), ("graphs", True)):
        options = {"cuda_graphs": graphs}
        engine = make_engine(EngineConfig(name="native", max_sequences=rows, options=options), model)
        engine.refresh(0)
        prompts = make_prompts(stage, rows)

        def work(engine: Any = engine, prompts: list[list[int]] = prompts) -> None:
            engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens), range(rows))

        work()
        _keep_kernels(stage, name, work, of=new_tokens)
        del engine


def update_kernels(stage: Stage) -> None:
    """The kernels of an optimizer step over packed rows, by the default configuration."""
    rows, tokens = (4, 8) if stage.dry else (64, ROW_TOKENS)
    for name in ("05b", "135m"):
        config = _config(stage, name)
        engine = TrainEngine(
            load_model(config, stage.device), optim=OptimConfig(lr=1e-6), parallel=ParallelConfig(), device=stage.device
        )
        batch = random_rows((tokens,) * rows, config.config["vocab_size"])

        def work(engine: TrainEngine = engine, batch: Any = batch) -> None:
            engine.step(batch, lambda micro: TokenLoss(-score_tokens(engine.model, batch, micro).logprobs))

        work()
        _keep_kernels(stage, name, work, of=rows)
        del engine


def _config(stage: Stage, name: str = "05b", **settings: Any) -> ModelConfig:
    shape = model_config(stage)
    if name == "135m" and not stage.dry:
        shape = {"model_type": "qwen3", **SHAPES["135m"].config()}
    return ModelConfig(config=shape, tokenizer=TOKENIZER, **settings)


def _keep_kernels(stage: Stage, name: str, work: Callable[[], None], *, of: int) -> None:
    """Keep the wall time of ``work``, how long the device was busy, and the kernels that took longest."""
    stage.figure(f"{name}_wall", wall_s(work, stage.device) * 1e3, "ms")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if stage.on_gpu else [])]
    with profile(activities=activities) as profiled:
        stage.figure(f"{name}_wall_profiled", wall_s(work, stage.device) * 1e3, "ms")
    key = "self_device_time_total" if stage.on_gpu else "self_cpu_time_total"
    kernels = [kernel for kernel in profiled.key_averages() if not stage.on_gpu or kernel.device_type.name == "CUDA"]
    kernels.sort(key=lambda kernel: -getattr(kernel, key))
    busy_us = sum(getattr(kernel, key) for kernel in kernels)
    stage.figure(f"{name}_busy", busy_us / 1e3, "ms of kernels")
    stage.figure(f"{name}_kernels", sum(kernel.count for kernel in kernels) / of, "kernels a token, or a row")
    for number, kernel in enumerate(kernels[:MOST_KERNELS], 1):
        kernel_us = getattr(kernel, key)
        share = kernel_us / max(busy_us, 1)
        what = f"{share:.1%} {kernel_us / 1e3:.1f} ms, {kernel.count} times: {kernel.key[:110]}"
        stage.fact(f"{name} {number}", what)
