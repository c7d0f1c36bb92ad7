"""Teach a small language model to add, on this machine, from nothing: supervised warm-up, then GRPO.

    python examples/quickstart.py                 two-digit sums, two minutes on two cores
    python examples/quickstart.py --smoke         copying three digits, no warm-up, under a minute
    python examples/quickstart.py --backend ray   the same on Ray

The model is made from a transformers config with a tokenizer of one token a character. The warm-up stops when it gets
about a third of held-out sums right; from there on it only hears whether its own answers were right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import podium
from podium.models import ModelConfig
from podium.rewards import RewardConfig
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
    Summary,
)
from podium.training import OptimConfig

TOKENIZER = "chars:0123456789+= "


def qwen3(hidden: int, layers: int) -> dict[str, Any]:
    """The shape of a small Qwen3; vocabulary and special tokens come from the tokenizer."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }


def write_rows(path: Path, answers: Mapping[str, str]) -> str:
    """Write a file of prompts with their answers, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in answers.items())
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def addition(cluster: podium.Cluster, seed: int, out: Path) -> Summary:
    """All sums of two numbers of two digits; a tenth of them is held out."""
    numbers = range(10, 100)
    sums = write_rows(out / "sums.jsonl", {f"{a} + {b} =": str(a + b) for a in numbers for b in numbers})
    data = DataConfig(train=sums, holdout=0.1)
    # Two ranks of one thread each; a backend without collectives (inline) has one rank.
    ranks = 2 if cluster.capabilities.collectives else 1
    placement = PlacementConfig(ranks=ranks, cpus=1)
    warmup = SFTConfig(
        run=RunConfig(dir=str(out), name="warmup", seed=seed, steps=1500),
        model=ModelConfig(config=qwen3(hidden=128, layers=4), tokenizer=TOKENIZER, seed=seed),
        data=data,
        sampling=SamplingParams(max_new_tokens=6),
        optim=OptimConfig(lr=1e-3, warmup_steps=20),
        batch=ExampleBatch(examples=64),
        placement=placement,
        eval=EvalConfig(items=200, every=10, at_start=False, metric="accuracy", stop_at=0.33),
    )
    warm = SFTTrainer(warmup, cluster=cluster, report=False).fit()
    if not warm.finished:  # Ctrl-C
        raise SystemExit(f"stopped during the warm-up; to continue: podium train sft --resume {out / 'warmup'}")
    grpo = GRPOConfig(
        run=RunConfig(dir=str(out), name="grpo", seed=seed, steps=300),
        model=ModelConfig(path=str(warm.model_path)),
        data=data,
        reward=RewardConfig(name="exact"),
        sampling=SamplingParams(max_new_tokens=6, n=8),
        optim=OptimConfig(lr=2e-4),
        batch=PromptBatch(prompts=64),
        placement=placement,
        eval=EvalConfig(items=500, every=50),
    )
    return PPOTrainer(grpo, cluster=cluster).fit()


def copying(cluster: podium.Cluster, seed: int, out: Path) -> Summary:
    """``123 =`` is to be answered by ``123``; the reward is the share of digits in their places, 1 for all of them."""
    numbers = [f"{number:03d}" for number in range(1000)]
    copies = write_rows(out / "copy.jsonl", {f"{number} =": number for number in numbers})
    config = GRPOConfig(
        run=RunConfig(dir=str(out), name="grpo", seed=seed, steps=180),
        model=ModelConfig(config=qwen3(hidden=64, layers=2), tokenizer=TOKENIZER, seed=seed),
        data=DataConfig(train=copies, holdout=0.2),
        reward=RewardConfig(name="fraction", correct_at=1.0),
        sampling=SamplingParams(max_new_tokens=4, n=8),
        optim=OptimConfig(lr=1e-3),
        batch=PromptBatch(prompts=32),
        placement=PlacementConfig(cpus=1),  # so small a model gains nothing from a second thread
        eval=EvalConfig(items=500, every=20, stop_at=0.97),
    )
    return PPOTrainer(config, cluster=cluster).fit()


def podium_command() -> str:
    """Return podium by name if that is on the path of the shell, and otherwise by its place beside this Python."""
    return "podium" if shutil.which("podium") else os.path.relpath(Path(sys.executable).with_name("podium"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller model learns an easier task in under a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="local", help="local (default), inline, ray or ray://HOST:PORT")
    parser.add_argument("--out", type=Path, help="a new directory for the run; default: runs/quickstart-TIME")
    arguments = parser.parse_args()
    out: Path = arguments.out or Path("runs") / f"quickstart-{time.strftime('%Y-%m-%d-%H%M%S')}"

    hints = {"log_dir": out / "logs", "preload": PRELOAD}  # for backends that have these options
    with podium.connect(arguments.backend, hints=hints) as cluster:
        teach = copying if arguments.smoke else addition
        summary = teach(cluster, arguments.seed, out)
    for name in ("summary.json", "curve.png"):
        if (out / "grpo" / name).exists():  # no curve without matplotlib
            shutil.copy(out / "grpo" / name, out / name)
    print(f"\n  summary  {out / 'summary.json'}")
    print(f"  view     {podium_command()} view {out / 'grpo'}")
    prompt = "123 =" if arguments.smoke else "27 + 48 ="
    print(f"  try it   {podium_command()} sample {out / 'grpo'} --prompt '{prompt}'")
    if summary.before and summary.after:
        print(f"  gained   {100 * (summary.after['accuracy'] - summary.before['accuracy']):.1f} points")


if __name__ == "__main__":
    main()
