"""Teach SmolLM2-135M-Instruct to answer a sum with the right equation and nothing else, on two cores without a GPU.

    python examples/real/train.py              GRPO on all weights
    python examples/real/train.py --lora       GRPO on adapters
    python examples/real/train.py --sft        fine-tuning on the right equations
    python examples/real/train.py --dpo        preferences: the right equation, and what the model does instead
    python examples/real/train.py --tool       GRPO of sessions: products, with a tool that multiplies (tool.py)

Asked for 7 + 5, the model writes a wrong equation, or goes on after the right one, or talks about sums. It hears only
what reward.py says of its own answers. A fifth of the sums is held out. `make real` converts the model first, and runs
this.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from rows import pairs, products, sums, write_rows

import podium
from podium.models import LoraConfig, ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer import (
    PRELOAD,
    EvalConfig,
    ExampleBatch,
    GRPOConfig,
    PlacementConfig,
    PPOTrainer,
    PromptBatch,
    RunConfig,
    SFTConfig,
    SFTTrainer,
)
from podium.training import OptimConfig

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / ".cache" / "real" / "model"


def train(options: argparse.Namespace, out: Path) -> None:
    """Train once, in ``out / "run"``."""
    lora = LoraConfig(rank=16) if options.lora else None
    rate = options.lr or (2e-4 if lora else 1e-5)
    run = RunConfig(dir=str(out), name="run", seed=options.seed, steps=options.steps or 12)
    model = ModelConfig(path=str(options.model), lora=lora)
    data = DataConfig(train=write_rows(out / "sums.jsonl", sums()), holdout=0.2)
    reward = RewardConfig(name=f"{HERE / 'reward.py'}:score")
    evaluation = EvalConfig(every=4, metric="reward")
    optim = OptimConfig(lr=rate)
    placement = PlacementConfig(cpus=options.cpus)
    with podium.connect(options.backend, hints={"log_dir": out / "logs", "preload": PRELOAD}) as cluster:
        if options.sft:
            tuning = SFTConfig(
                run=run,
                model=model,
                data=data,
                reward=reward,
                sampling=SamplingParams(max_new_tokens=14),
                optim=optim,
                batch=ExampleBatch(examples=32),
                placement=placement,
                eval=evaluation,
            )
            SFTTrainer(tuning, cluster=cluster).fit()
            return
        config = GRPOConfig(
            run=run,
            model=model,
            data=data,
            reward=reward,
            sampling=SamplingParams(max_new_tokens=14, n=8, temperature=0.7),
            optim=optim,
            batch=PromptBatch(prompts=8),
            placement=placement,
            eval=evaluation,
        )
        if options.tool:
            config = replace(
                config,
                run=replace(run, steps=options.steps or 8),
                data=DataConfig(
                    train=write_rows(out / "products.jsonl", products()),
                    holdout=0.2,
                    chat_template=str(HERE / "tools.jinja"),
                ),
                environment=EnvironmentConfig(name=f"{HERE / 'tool.py'}:play"),
                reward=RewardConfig(),
                sampling=replace(config.sampling, max_new_tokens=36),
                batch=PromptBatch(prompts=4),
            )
        PPOTrainer(config, cluster=cluster).fit()


def prefer(options: argparse.Namespace, out: Path) -> None:
    """Train by DPO, with the command for it, in ``out / "run"``."""
    values = {
        "run.dir": out,
        "run.name": "run",
        "run.seed": options.seed,
        "run.steps": options.steps or 8,
        "model.path": options.model,
        "data.train": write_rows(out / "pairs.jsonl", pairs()),
        "data.holdout": 0.2,
        "reward.name": f"{HERE / 'reward.py'}:score",
        "sampling.max_new_tokens": 14,
        "optim.lr": options.lr or (2e-4 if options.lora else 1e-5),
        "batch.examples": 8,
        "eval.every": 4,
        "eval.metric": "reward",
        **({"placement.cpus": options.cpus} if options.cpus else {}),
        **({"model.lora.rank": 16} if options.lora else {}),
    }
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "podium", "train", "dpo", "--backend", options.backend, *words]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train adapters instead of all weights")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--sft", action="store_true", help="fine-tune on the answers instead of GRPO")
    ways.add_argument("--dpo", action="store_true", help="train on preferences between answers instead of GRPO")
    ways.add_argument("--tool", action="store_true", help="let the model answer products with a tool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 12, and 8 with --dpo and --tool")
    parser.add_argument("--lr", type=float, help="default: 1e-5, and 2e-4 for adapters")
    parser.add_argument("--cpus", type=int, help="cores of the worker process; default: all; on a busy machine: 1")
    parser.add_argument("--backend", default="local", help="local (default), inline, ray or ray://HOST:PORT")
    parser.add_argument("--model", type=Path, default=MODEL, help="default: what convert.py wrote")
    parser.add_argument("--out", type=Path, help="a new directory for the run; default: runs/real-TIME")
    options = parser.parse_args()
    if not options.model.exists():
        sys.exit(f"there is no model in {options.model}: python {HERE / 'convert.py'} fetches and converts it")
    out: Path = options.out or Path("runs") / f"real-{time.strftime('%Y-%m-%d-%H%M%S')}"

    (prefer if options.dpo else train)(options, out)
    summary = json.loads((out / "run" / "summary.json").read_text())
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor_s = sum(used.ru_utime + used.ru_stime for used in usage)
    (out / "cost.json").write_text(
        json.dumps({"wall_s": summary["wall_s"], "processor_s": round(processor_s, 1)}) + "\n"
    )
    print(f"\n  time     {summary['wall_s']:.0f} s by the clock, {processor_s:.0f} s of processor time")
    if summary["before"] and summary["after"]:
        before, after = summary["before"]["reward_mean"], summary["after"]["reward_mean"]
        print(f"  gained   {after - before:+.3f} of held-out reward: {before:.3f} before, {after:.3f} after")
    command = "podium" if shutil.which("podium") else os.path.relpath(Path(sys.executable).with_name("podium"))
    print(f"  view     {command} view {out / 'run'}")


if __name__ == "__main__":
    main()
