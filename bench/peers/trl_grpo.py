"""TRL's GRPOTrainer on the workload of bench.suites.grpo. Runs in .venvs/trl, without Podium.

The settings are the fastest found on two CPU cores: no gradient checkpointing (on by default), one micro-batch, no
reference model, nothing logged. Training pauses after each block of steps, inside a callback, until the bench asks
for the next, so that peers and Podium take turns.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from typing import Any

import torch
from protocol import Peer

PAUSE_EVERY_STEPS = 1_000_000


def build_tokenizer(alphabet: str) -> Any:
    """One token a letter; padding is 0, and the end of sequence lies outside the model's vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    vocabulary["<eos>"] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class Pacer:
    """Runs as many steps as the bench asks for, then waits for its next request."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._left = 0
        self._started = 0.0
        self._step_s: list[float] = []
        self.generate_s: list[float] = []
        self.tokens: list[int] = []

    def wait(self) -> bool:
        """Block until the next block of steps is asked for; False when the bench is done."""
        request = self._peer.next_request()
        if request is None:
            return False
        self._left = request[1]["count"]
        self._step_s, self.generate_s, self.tokens = [], [], []
        self._started = time.perf_counter()
        return True

    def step_ended(self) -> bool:
        """Note the step; False when the bench is done."""
        now = time.perf_counter()
        self._step_s.append(now - self._started)
        self._started = now
        self._left -= 1
        if self._left:
            return True
        self._peer.reply({"step_s": self._step_s, "generate_s": self.generate_s, "tokens": self.tokens})
        return self.wait()


def build_trainer(load: dict[str, Any], pacer: Pacer, *, gradient_checkpointing: bool) -> Any:
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not pacer.step_ended()

    torch.manual_seed(load["seed"])
    model = Qwen3ForCausalLM(Qwen3Config(**load["config"]))
    source = random.Random(load["seed"])
    texts = ["".join(source.choices(load["alphabet"], k=load["prompt_tokens"])) for _ in range(4096)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [text.count("a") / max(len(text), 1) for text in completions],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            per_device_train_batch_size=load["prompts"] * load["completions"],
            num_generations=load["completions"],
            max_completion_length=load["new_tokens"],
            temperature=load["temperature"],
            learning_rate=load["learning_rate"],
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=gradient_checkpointing,
            max_steps=PAUSE_EVERY_STEPS,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=load["seed"],
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=build_tokenizer(load["alphabet"]),
        callbacks=[Turns()],
    )
    generate = trainer.model.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = generate(*args, **kwargs)
        pacer.generate_s.append(time.perf_counter() - started)
        pacer.tokens.append(output.shape[0] * (output.shape[1] - load["prompt_tokens"]))
        return output

    trainer.model.generate = timed_generate
    return trainer


def main() -> None:
    peer = Peer()
    request = peer.next_request()
    if request is None:
        return
    arguments = request[1]
    torch.set_num_threads(arguments["threads"])
    pacer = Pacer(peer)
    try:
        trainer = build_trainer(arguments["load"], pacer, gradient_checkpointing=arguments["gradient_checkpointing"])
        peer.reply({"parameters": sum(weight.numel() for weight in trainer.model.parameters())})
        if pacer.wait():
            trainer.train()
    except Exception as error:  # noqa: BLE001 - crosses to the bench, which raises it there
        peer.fail(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
