"""Whole GRPO steps: colocated, split over two processes that share the GPU, and beside TRL at equal lengths."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.shapes import TOKENIZER, load_of, model_config
from bench.gpu.stage import Stage
from bench.peer import PeerClient, peer_command, python_of, start_peer
from bench.podium_grpo import write_prompts
from bench.workload import SHAPES, StepLoad, allow_unused_stop
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.runs.sections import EvalConfig, PlacementConfig, PromptBatch, RunConfig, SaveConfig
from podium.telemetry import Event, Note, StageFinished, StepFinished, metrics, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.training import OptimConfig

WARMUPS = 1  # steps whose figures are not kept: buffers grow, and kernels are chosen
STEPS = 3
DRY_STEPS = 2


class Watch:
    """What telemetry tells of a run: when steps ended, seconds of their stages, memory, and notes."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self.stage_s: dict[str, list[float]] = {}
        self.metrics: list[Mapping[str, float]] = []
        self.notes: list[str] = []

    def take(self, event: Event) -> None:
        if isinstance(event, StageFinished):
            self.stage_s.setdefault(event.name, []).append((event.ended_ns - event.started_ns) / 1e9)
        elif isinstance(event, StepFinished):
            self.step_ends.append(time.monotonic())
            self.metrics.append(event.metrics)
        elif isinstance(event, Note):
            self.notes.append(event.text)

    def step_s(self) -> float:
        """The median seconds of a step after the warm-ups."""
        ends = self.step_ends[WARMUPS - 1 :]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))


def colocated(stage: Stage) -> None:
    """A GRPO step where policy and generator share one process and one set of weights."""
    _steps(stage, PlacementConfig(), model_config(stage))


def split(stage: Stage) -> None:
    """The same where the generator has a process of its own on the same GPU, and gets the weights by publication."""
    watch = _steps(stage, PlacementConfig(layout="split"), model_config(stage))
    published = [seconds for name, times in watch.stage_s.items() if "sync" in name or "publish" in name
                 for seconds in times[WARMUPS:]]  # fmt: skip
    if published:
        stage.figure("publication", statistics.median(published) * 1e3, "ms of all weights to the generator")


def beside_trl_135m(stage: Stage) -> None:
    """:func:`beside_trl` at the sizes of SmolLM2-135M."""
    beside_trl(stage, "135m")


def beside_trl(stage: Stage, size: str = "100m") -> None:
    """The same model, prompts, lengths and sampling in Podium and in TRL, each in bf16, one after the other."""
    load = load_of(stage) if stage.dry else replace(load_of(stage), shape=size)
    shape = {"model_type": "qwen3", **SHAPES[load.shape].config()}
    python = Path(sys.executable) if importlib.util.find_spec("trl") else python_of("trl")
    if python is None:
        _steps(stage, PlacementConfig(), shape, prefix="podium_", load=load)
        stage.leave_out("trl", "TRL is not installed; make gpu-wheels packs it, make bench-peers installs it")
        return
    with tempfile.NamedTemporaryFile("r") as log, start_peer(peer_command(python, "trl_grpo"), Path(log.name)) as peer:
        watch = _steps(stage, PlacementConfig(), shape, prefix="podium_", load=load)  # TRL is imported meanwhile
        stage.part("trl", lambda: _trl(stage, load, peer, watch.step_s()))


def _trl(stage: Stage, load: StepLoad, peer: PeerClient, podium_s: float) -> None:
    peer.call("open", load={**load.as_arguments(), "cuda": stage.on_gpu}, threads=None, gradient_checkpointing=False)
    peer.call("steps", count=WARMUPS)
    times = peer.call("steps", count=1 if stage.dry else STEPS - WARMUPS)
    seconds = statistics.median(times["step_s"])
    stage.figure("trl_step", seconds, "s")
    stage.figure("trl_generate", statistics.median(times["generate_s"]), "s")
    stage.figure("times_trl", seconds / podium_s, "times TRL's speed")


def _steps(
    stage: Stage, placement: PlacementConfig, shape: Mapping[str, Any], prefix: str = "", load: StepLoad | None = None
) -> Watch:
    """Run a few steps and keep the figures of a step."""
    load, watch = load or load_of(stage), Watch()
    with tempfile.TemporaryDirectory(prefix="podium-gpu-") as folder:
        config = config_of(load, shape, placement, Path(folder), DRY_STEPS if stage.dry else STEPS)
        stop = subscribe(watch.take)
        try:
            PPOTrainer(config, show=False, report=False).fit()
        finally:
            stop()
    seconds = watch.step_s()
    stage.figure(f"{prefix}step", seconds, "s")
    stage.figure(f"{prefix}tokens", load.tokens / seconds, "sampled tokens/s over the whole step")
    for name, times in watch.stage_s.items():
        if len(times) > WARMUPS:
            stage.figure(f"{prefix}{name}", statistics.median(times[WARMUPS:]) * 1e3, "ms")
    generate = watch.stage_s.get("generate", [])[WARMUPS:]
    if generate:
        stage.figure(f"{prefix}generated", load.tokens / statistics.median(generate), "tokens/s while generating")
    last = watch.metrics[-1]
    peak = last.get("policy/memory_peak_gib")
    if peak is not None:
        stage.figure(f"{prefix}memory_peak", peak, "GiB of tensors in the policy's process")
    if stage.on_gpu and any(text.startswith("placement") and " on cpu" in text for text in watch.notes):
        stage.failures.append(f"{prefix}a role stands on the CPU, although there is a GPU")
    norm = last[metrics.GRAD_NORM]
    stage.figure(f"{prefix}grad_norm", norm, "of the last update")
    if not math.isfinite(norm):
        stage.failures.append(f"{prefix}grad_norm is {norm}")
    for number, text in enumerate(dict.fromkeys(watch.notes), 1):
        stage.fact(f"{prefix}note {number}", text)
    return watch


def config_of(
    load: StepLoad, shape: Mapping[str, Any], placement: PlacementConfig, folder: Path, steps: int
) -> GRPOConfig:
    """The configuration of a run, with Podium's defaults wherever the workload says nothing else."""
    data = folder / "prompts.jsonl"
    write_prompts(data, load)
    allow_unused_stop()
    return GRPOConfig(
        run=RunConfig(dir=str(folder), name="run", seed=load.seed, steps=steps),
        model=ModelConfig(config=shape, tokenizer=TOKENIZER, seed=load.seed),
        data=DataConfig(train=str(data), holdout=0.0),
        reward=RewardConfig(name="bench.gpu.shapes:reward"),
        optim=OptimConfig(lr=load.learning_rate),
        placement=placement,
        batch=PromptBatch(prompts=load.prompts),
        sampling=SamplingParams(
            max_new_tokens=load.new_tokens, temperature=load.temperature, n=load.completions,
            stop_token_ids=(shape["vocab_size"],),  # beyond the vocabulary, so that completions are of full length
        ),
        engine=EngineConfig(name="native", max_sequences=load.prompts * load.completions),
        eval=EvalConfig(items=0),
        save=SaveConfig(model=False, minutes=0.0),
    )  # fmt: skip
