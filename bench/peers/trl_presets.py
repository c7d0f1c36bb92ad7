"""TRL's GRPOTrainer on the task of bench.presets. Runs in .venvs/trl, without Podium.

The model, the prompts, the batch, the learning rate and the schedule are those of Podium's runs. The loss has the
settings of the paper that Podium's preset `grpo` has: the mean over a completion's tokens, clipping and KL.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from protocol import Peer


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@torch.no_grad()
def score(model: Any, tokenizer: Any, rows: list[dict[str, str]], new_tokens: int, draws: int) -> float:
    """The share of prompts whose completion, drawn at temperature 1, is the answer."""
    rows = rows * draws
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    training = model.training
    model.eval()
    ids = model.generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model.train(training)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def train(
    model: str, train: str, held_out: str, seed: int, steps: int, every: int, learning_rate: float, prompts: int,
    completions: int, new_tokens: int, minibatches: int, draws: int, kl: float, clip: float,
) -> dict[str, Any]:  # fmt: skip
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    began, before = time.monotonic(), processor_s()
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = read_rows(held_out)
    torch.manual_seed(seed)
    points: list[tuple[int, float]] = [(0, score(policy, tokenizer, rows, new_tokens, draws))]

    class Evaluation(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, rest = divmod(state.global_step, minibatches)  # TRL counts updates
            if rest == 0 and step % every == 0:
                points.append((step, score(policy, tokenizer, rows, new_tokens, draws)))

    GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, answer, **kwargs: [
            float(text.strip() == right) for text, right in zip(completions, answer, strict=True)
        ],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            per_device_train_batch_size=prompts * completions // minibatches,
            steps_per_generation=minibatches,
            num_generations=completions,
            max_completion_length=new_tokens,
            temperature=1.0,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=kl,
            epsilon=clip,
            gradient_checkpointing=False,
            max_steps=steps * minibatches,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(read_rows(train)),
        processing_class=tokenizer,
        callbacks=[Evaluation()],
    ).train()
    return {"points": points, "seconds": time.monotonic() - began, "processor_s": processor_s() - before}


if __name__ == "__main__":
    Peer().serve({"train": train})
