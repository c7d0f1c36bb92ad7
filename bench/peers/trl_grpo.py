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
from protocol import Pacer, Peer

MANY_STEPS = 1_000_000
MOST_ROWS = 32  # of a micro-batch on a GPU


def build_tokenizer(alphabet: str, specials: int, eos: int) -> Any:
    """One token a letter, with the ids of Podium's; the end of sequence lies outside the model's vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", *(f"<special {place}>" for place in range(1, specials)), *alphabet]
    vocabulary = {name: place for place, name in enumerate(names)} | {"<eos>": eos}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class Generation:
    """What `generate` cost since it was last asked: seconds and completion tokens of each call."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def wrap(self, generate: Any, prompt_tokens: int) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            output = generate(*args, **kwargs)
            self._seconds.append(time.perf_counter() - started)
            self._tokens.append(output.shape[0] * (output.shape[1] - prompt_tokens))
            return output

        return timed

    def details(self, began_ns: int, ended_ns: int) -> dict[str, Any]:
        told = {"generate_s": self._seconds, "tokens": self._tokens}
        self._seconds, self._tokens = [], []
        return told


def build_trainer(load: dict[str, Any], pacer: Pacer, generation: Generation, *, gradient_checkpointing: bool) -> Any:
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not pacer.step_ended()

    rows = load["prompts"] * load["completions"]
    parts = max(1, rows // MOST_ROWS) if load.get("cuda") else 1  # all rows at once need more than 80 GB
    cuda = load.get("cuda", False)  # bench.gpu asks for products in bfloat16 on the GPU
    torch.manual_seed(load["seed"])
    if load.get("path"):
        model = Qwen3ForCausalLM.from_pretrained(load["path"], dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**load["config"]))
    source = random.Random(load["seed"])
    texts = ["".join(source.choices(load["alphabet"], k=load["prompt_tokens"])) for _ in range(4096)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [text.count("a") / max(len(text), 1) for text in completions],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            per_device_train_batch_size=rows // parts,
            gradient_accumulation_steps=parts,
            num_generations=load["completions"],
            max_completion_length=load["new_tokens"],
            temperature=load["temperature"],
            learning_rate=load["learning_rate"],
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=gradient_checkpointing,
            max_steps=MANY_STEPS,
            bf16=cuda,
            use_cpu=not cuda,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=load["seed"],
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=build_tokenizer(load["alphabet"], load["specials"], load["config"]["vocab_size"]),
        callbacks=[Turns()],
    )
    trainer.model.generate = generation.wrap(trainer.model.generate, load["prompt_tokens"])
    return trainer


def main() -> None:
    peer = Peer()
    import trl  # noqa: F401 - while nobody waits for it

    request = peer.next_request()
    if request is None:
        return
    arguments = request[1]
    if arguments["threads"] is not None:
        torch.set_num_threads(arguments["threads"])
    generation = Generation()
    pacer = Pacer(peer, generation.details)
    load, checkpointing = arguments["load"], arguments["gradient_checkpointing"]
    try:
        trainer = build_trainer(load, pacer, generation, gradient_checkpointing=checkpointing)
        peer.reply({"parameters": sum(weight.numel() for weight in trainer.model.parameters())})
        if pacer.wait():
            trainer.train()
    except Exception as error:  # noqa: BLE001 - crosses to the bench, which raises it there
        peer.fail(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
