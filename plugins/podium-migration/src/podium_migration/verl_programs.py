"""Which program of verl a file is for: its PPO trainer is converted, and others are refused, with what to run here."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from podium.errors import ConfigError
from podium_migration.shell import UNDECIDED

_CONVERTED: Final = "main_ppo"
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_OVERRIDE: Final = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=", re.DOTALL)
_OF_VERL: Final = re.compile(r"(^|/)verl(\.|/(trainer|experimental)/)")
OF_SFT: Final = {
    "model.partial_pretrain": "model.path",
    "model.path": "model.path",
    "model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_max_samples": "data.train_items",
    "data.val_max_samples": "eval.items",
    "data.prompt_key": "data.prompt_column",
    "data.response_key": "data.answer_column",
    "data.messages_key": "data.prompt_column",
    "data.multiturn.messages_key": "data.prompt_column",
    "data.train_batch_size": "batch.examples",
    "optim.lr": "optim.lr",
    "optim.betas": "optim.betas",
    "optim.weight_decay": "optim.weight_decay",
    "optim.clip_grad": "optim.grad_clip",
    "optim.lr_scheduler": "optim.lr_schedule",
    "optim.lr_scheduler_type": "optim.lr_schedule",
    "trainer.total_epochs": "run.epochs",
    "trainer.total_training_steps": "run.steps",
    "trainer.seed": "run.seed",
    "trainer.experiment_name": "run.name",
    "trainer.save_freq": "save.every",
    "trainer.test_freq": "eval.every",
}
"""The settings of verl's trainer of fine-tuning that have the same values here."""
_SFT: Final = (
    "it is podium train sft, whose batch.examples is their data.train_batch_size, while data.max_length has no "
    "counterpart (no answer is cut): docs/training.md"
)
_OTHERS: Final = {
    "main_generation": "podium eval MODEL writes the completions of held-out prompts, with their rewards",
    "main_eval": "podium eval MODEL grades completions as it draws them",
    "fully_async": "it is podium train grpo with run.schedule asynchronous and placement.layout split; the settings "
    f"that it shares with {_CONVERTED} are converted where that program stands in its place",
    "model_merger": "podium export RUN writes the model of a run for transformers",
}


def choose_commands(path: Path, commands: Sequence[Sequence[str]]) -> tuple[list[Sequence[str]], list[tuple[str, str]]]:
    """Return the commands whose settings are converted, and other programs that get settings, with remarks on them.

    Raises:
        ConfigError: The file runs no program that is converted, and another one of verl. The message says what to run.
    """
    programs = [(_find_program(words), words) for words in commands if any(map(_OVERRIDE.match, words))]
    converted = [words for program, words in programs if _shorten(program).startswith(_CONVERTED)]
    others = [(program, words) for program, words in programs if words not in converted]
    refused = [(program, words) for program, words in others if _is_refused(program)]
    if refused and not converted:
        program, words = refused[0]
        raise ConfigError(f"{path} runs verl's {explain_program(program, _read_settings(words))}")
    kept = converted or [words for _, words in others] or list(commands)
    remarks = [(program, _BESIDE) for program, words in others if converted and program]
    remarks += [(program, _UNKNOWN) for program, _ in others if not converted and program]
    return kept, [(name.replace(UNDECIDED, "…"), remark) for name, remark in remarks]


def check_settings(path: Path, values: Mapping[str, Any]) -> None:
    """Check that settings are not those of verl's trainer of fine-tuning, whose sections model and optim the PPO
    trainer lacks.

    Raises:
        ConfigError: They are. The message says what to run.
    """
    sections = {name.partition(".")[0] for name in values}
    if sections & {"optim", "model"} and not sections & {"actor_rollout_ref", "algorithm", "critic"}:
        raise ConfigError(f"{path} has settings of verl's {explain_program('sft_trainer', values)}")


def explain_program(program: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a program of verl that is not converted, and what to run in its place."""
    name = _shorten(program)
    if "sft" not in name:
        remark = next(
            (text for key, text in _OTHERS.items() if key in program), "docs/coming-from-verl.md has the rest"
        )
        return f"{name}, which is not converted: {remark}. The program that is converted: {_CONVERTED}"
    pairs = {OF_SFT[key]: value for key, value in settings.items() if key in OF_SFT and value is not None}
    words = [f"--{key} {_write(value)}" for key, value in pairs.items() if not _means_default(value)]
    command = " ".join(["podium train sft", *words])
    return f"{name}, which is not converted: {_SFT}; write {command}. The program that is converted: {_CONVERTED}"


def _means_default(value: Any) -> bool:
    return value == -1 or UNDECIDED in str(value) or "${" in str(value)


def _write(value: Any) -> str:
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return shlex.quote(text.removesuffix("\n").removesuffix("\n..."))


def _read_settings(words: Sequence[str]) -> dict[str, Any]:
    pairs = [word.lstrip("+").partition("=") for word in words if _OVERRIDE.match(word) and not word.startswith("~")]
    return {name: _read_value(value) for name, _, value in pairs}


def _read_value(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _find_program(words: Sequence[str]) -> str:
    """The module behind -m or the script that a command runs; "" where it names none."""
    for before, word in zip(["", *words], words, strict=False):
        is_module = before in ("-m", "--module") and word not in _LAUNCHERS
        if is_module or (word.endswith(".py") and "=" not in word):
            return word
    return ""


def _shorten(program: str) -> str:
    return os.path.basename(program.removesuffix(".py")).rpartition(".")[2]


def _is_refused(program: str) -> bool:
    """Whether a program has other settings than the PPO trainer: those of verl itself, and any of fine-tuning."""
    return bool(_OF_VERL.search(program)) or "sft" in _shorten(program)


_BESIDE: Final = "the file runs this program too, whose settings are not converted: put it into a file of its own"
_UNKNOWN: Final = (
    f"this program is none of verl's own, and its settings are taken for those of {_CONVERTED}: what it does otherwise "
    "is not read"
)
