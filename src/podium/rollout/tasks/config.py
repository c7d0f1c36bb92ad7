"""What data a run takes and how its rows become prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from podium.errors import ConfigError

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the examples are, which columns matter, and how a prompt is written for the model.

    Raises:
        ConfigError: a value outside its range, named.
    """

    train: str = ""  # .jsonl or .parquet file or glob, a directory or hub dataset, or reasoning_gym:TASK
    eval: str = ""  # held-out data, named likewise; empty: what holdout keeps apart, or a hub dataset's eval_split
    holdout: float = 0.1  # share of train kept apart for evaluation where there is no other held-out data
    train_items: int | None = None  # most training examples; null: all of a file, 10000 of a generated task
    prompt_column: str = "prompt"  # column with the prompt: text, or a list of chat messages
    answer_column: str | None = "answer"  # column with the answer; null: there is none
    template: str = ""  # writes the prompt from any columns, as in "Q: {question}\nA: "; replaces prompt_column
    system_prompt: str = ""  # goes before each prompt that brings no system message of its own
    chat_template: str = "auto"  # auto: the tokenizer's if it has one; none: plain text; or a Jinja file
    max_prompt_tokens: int = 1024  # longest prompt, with system prompt and template
    overlong: Literal["drop", "cut"] = "drop"  # a longer one: left out, or its text shortened from the front
    train_split: str = "train"  # split of a hub dataset or directory to train on
    eval_split: str = "test"  # split of a hub dataset or directory to evaluate on
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reasoning_gym task, or of datasets.load_dataset

    def __post_init__(self) -> None:
        checks = {
            "holdout": (0 <= self.holdout < 1, "a share, at least 0 and below 1"),
            "train_items": (self.train_items is None or self.train_items >= 1, "at least 1, or null for all"),
            "prompt_column": (bool(self.prompt_column), "a column's name"),
            "answer_column": (self.answer_column != "", "a column's name, or null if there is none"),
            "chat_template": (bool(self.chat_template), '"auto", "none" or a path'),
            "max_prompt_tokens": (self.max_prompt_tokens >= 1, "at least 1"),
            "overlong": (self.overlong in ("drop", "cut"), '"drop" or "cut"'),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"data.{name} = {getattr(self, name)!r}: expected {expected}")
