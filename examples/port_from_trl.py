"""A GRPO script of TRL, ported: the reward function is TRL's own, unchanged, and the settings have other names.

python examples/port_from_trl.py
python examples/port_from_trl.py --backend inline      in this process, for a debugger

In TRL 1.16 (trainer/grpo_trainer.py, trainer/grpo_config.py) the script is:

    dataset = Dataset.from_list([{"prompt": f"{digit}=", "solution": str(digit)} for digit in range(10)])

    def copied(completions, solution, **kwargs):                            # as it stands below
        return [1.0 if text[:1] == digit else 0.0 for text, digit in zip(completions, solution)]

    arguments = GRPOConfig(
        output_dir="runs/copy",                                             # run.dir, run.name
        max_steps=50,                                                       # run.steps
        learning_rate=1e-2,                                                 # optim.lr
        lr_scheduler_type="linear",                                         # optim.lr_schedule
        per_device_train_batch_size=64,                                     # batch.prompts = 64 / 8: it counts prompts
        num_generations=8,                                                  # sampling.n
        max_completion_length=2,                                            # sampling.max_new_tokens
        epsilon=0.2,                                                        # algorithm.clip_low, clip_high
        loss_type="dapo",                                                   # algorithm.aggregation = "token-mean"
        beta=0.0,                                                           # algorithm.kl_in = "none"
        report_to="tensorboard",                                            # run.trackers = ("tensorboard",)
    )
    trainer = GRPOTrainer(model=model, reward_funcs=copied, args=arguments, train_dataset=dataset)
    trainer.train()                                                         # PPOTrainer(config, reward=copied).fit()

The model is one of 50,000 parameters with random weights, so that this ends within seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from podium.algorithms import AlgorithmConfig
from podium.models import ModelConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer import EvalConfig, GRPOConfig, PPOTrainer, PromptBatch, RunConfig, SaveConfig
from podium.training import OptimConfig

SHAPE = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 32}


def copied(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    """One point for each completion that begins with its prompt's digit. TRL's form: lists in, a list out."""
    return [1.0 if text[:1] == digit else 0.0 for text, digit in zip(completions, solution, strict=True)]


def configuration(folder: Path) -> GRPOConfig:
    """The arguments above, each in its section. The data is a file, as ``dataset.to_json(path)`` writes it."""
    rows = [json.dumps({"prompt": f"{digit}=", "solution": str(digit)}) for digit in range(10)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return GRPOConfig(
        run=RunConfig(dir=str(folder), name="copy", steps=50),
        model=ModelConfig(config=SHAPE, tokenizer="chars:0123456789= "),  # or path="Qwen/Qwen3-0.6B"
        data=DataConfig(train=str(folder / "train.jsonl"), answer_column=None, holdout=0),
        batch=PromptBatch(prompts=8),
        sampling=SamplingParams(max_new_tokens=2, n=8),
        algorithm=AlgorithmConfig(clip_low=0.2, clip_high=0.2, aggregation="token-mean"),
        optim=OptimConfig(lr=1e-2, lr_schedule="linear"),
        eval=EvalConfig(items=0),  # TRL's eval_strategy="no"
        save=SaveConfig(minutes=0, model=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    backend = parser.parse_args().backend
    with tempfile.TemporaryDirectory() as folder:
        PPOTrainer(configuration(Path(folder)), cluster=backend, reward=copied, show=False).fit()
        rows = (Path(folder) / "copy" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(row)["reward/mean"] for row in rows]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert first < 0.4 < 0.7 < last, f"nothing was learned: {rewards}"
    print(f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps")


if __name__ == "__main__":
    main()
