"""Podium's trainer on the workload of bench.suites.grpo, in a process of its own, as each peer is.

It speaks the peers' protocol: training pauses after each block of steps, inside a listener of telemetry, until the
bench asks for the next.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.measure import covered
from bench.peers.protocol import Pacer, Peer
from bench.workload import ALPHABET, SHAPES, StepLoad, allow_unused_stop, prompt_texts
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.runs.sections import EvalConfig, PlacementConfig, PromptBatch, RunConfig, SaveConfig
from podium.telemetry import CallFinished, Event, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.training import OptimConfig

MANY_STEPS = 1_000_000
PROMPTS = 4096
LATE_EVENTS_S = 0.05  # the last call's event comes from another thread, a moment after its result


class Recorder:
    """What telemetry told since it was last asked: stages as the controller saw them, calls as the workers did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage_ns: dict[str, int] = defaultdict(int)
        self._calls_ns: list[tuple[int, int]] = []

    def take(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, StageFinished):
                self._stage_ns[event.name] += event.ended_ns - event.started_ns
            elif isinstance(event, CallFinished):
                self._calls_ns.append((event.started_ns, event.ended_ns))

    def details(self, began_ns: int, ended_ns: int) -> dict[str, Any]:
        """Seconds of each stage, and the share of the block in which no worker was at work."""
        time.sleep(LATE_EVENTS_S)
        with self._lock:
            stages = {name: spent / 1e9 for name, spent in self._stage_ns.items()}
            working_ns = covered(self._calls_ns, began_ns, ended_ns)
            self._stage_ns.clear()
            self._calls_ns.clear()
        return {"stage_s": stages, "outside_workers": 1 - working_ns / (ended_ns - began_ns)}


def write_prompts(path: Path, load: StepLoad) -> None:
    texts = prompt_texts(PROMPTS, load.prompt_tokens, load.seed)
    path.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))


def config_of(load: StepLoad, folder: Path) -> GRPOConfig:
    data = folder / "prompts.jsonl"
    write_prompts(data, load)
    allow_unused_stop()
    return GRPOConfig(
        run=RunConfig(dir=str(folder), name="run", seed=load.seed, steps=MANY_STEPS),
        model=ModelConfig(
            path=load.path,
            config={} if load.path else {"model_type": "qwen3", **SHAPES[load.shape].config()},
            tokenizer=f"chars:{ALPHABET}",
            seed=load.seed,
        ),
        data=DataConfig(train=str(data), holdout=0.0),
        reward=RewardConfig(name="bench.workload:reward"),
        optim=OptimConfig(lr=load.learning_rate),
        placement=PlacementConfig(ranks=load.ranks, cpus=2 // load.ranks),
        batch=PromptBatch(prompts=load.prompts),
        sampling=SamplingParams(
            max_new_tokens=load.new_tokens,
            temperature=load.temperature,
            n=load.completions,
            stop_token_ids=(load.unused_id,),
        ),
        engine=EngineConfig(name="native", max_sequences=load.prompts * load.completions // load.ranks),
        eval=EvalConfig(items=0),
        save=SaveConfig(model=False),
    )


def main() -> None:
    peer = Peer()
    request = peer.next_request()
    if request is None:
        return
    recorder = Recorder()
    pacer = Pacer(peer, recorder.details)
    load = StepLoad(**request[1]["load"])

    def on_event(event: Event) -> None:
        recorder.take(event)
        if isinstance(event, StepFinished) and not pacer.step_ended():
            # An exception would be noted as the listener's own, and the trainer would go on. Workers end with it.
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        try:
            trainer = PPOTrainer(config_of(load, Path(folder)), show=False)
            peer.reply()
            if pacer.wait():
                subscribe(on_event)
                trainer.fit()
        except Exception as error:  # noqa: BLE001 - crosses to the bench, which raises it there
            peer.fail(error)
            sys.exit(1)


if __name__ == "__main__":
    main()
