"""Settings of the data: where examples come from and how they become prompts."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError

__all__ = ["DataConfig"]


@section("data")
class DataConfig:
    """The data, its columns, and how a prompt is written for the model."""

    train: str = ""
    """Training examples come from this file or glob (.jsonl, .json, .csv, .tsv, .parquet, .arrow), directory, hub
    dataset, or reasoning_gym:TASK."""
    eval: str | tuple[str, ...] | Mapping[str, str] = ""
    """Held-out examples come from this source, named as in data.train, or from several sources: a list of them, or a
    mapping of names to them. The first source judges the run unless eval.metric names another. An empty value means
    the share data.holdout of the training data, or the split data.eval_split of a hub dataset.
    """
    holdout: float = Field(default=0.1, ge=0, lt=1)
    """This share of the training data is held out for evaluation where there is no other held-out data."""
    train_items: int | None = Field(default=None, ge=1, le=10**12)
    """Training uses at most this many examples. null means all of a file, and 10000 of a generated task."""
    prompt_column: str | None = Field(default="prompt", min_length=1)
    """This column holds the prompt: text, or a list of chat messages. A field of a column has a dot, as in
    input.messages. A template such as "Q: {question}\\nA: " writes the prompt from columns. Rows without a column
    "prompt" may have a conversation in "messages" or "conversations" instead. null means that the answer is a text
    without a prompt, of which supervised fine-tuning learns every token."""
    answer_column: str | None = Field(default="answer", min_length=1)
    """This column holds the answer that a reward compares with: text, a number, or a list of chat messages. A field of
    a column and a template are written as in prompt_column. Rows without a column "answer" may have "completion" or
    "reward_model.ground_truth" instead. null means that the data has no answers."""
    system_prompt: str = ""
    """This system message precedes each prompt, and each conversation of a session or of podium serve, that does not
    begin with a system message of its own.
    """
    chat_template: str = Field(default="auto", min_length=1)
    """Prompts are formatted by the tokenizer's chat template if it has one (auto), as plain text (none), by the
    tokenizer's template of this name, or by this Jinja file."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """The chat template gets these variables, such as enable_thinking."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=10**9)
    """A prompt has at most this many tokens, system prompt and template included."""
    overlong: Literal["drop", "cut"] = "drop"
    """A longer prompt is left out (drop), or its text is shortened at the front (cut)."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """A row that cannot be used, because it is malformed, too long for the model, or not what the chat template can
    write, ends the run with an error that names the row (refuse), or is left out and counted (drop)."""
    split_turns: bool = False
    """Supervised fine-tuning makes a row of each turn of the assistant, with the prompt that the chat template writes
    for this turn alone. The reasoning of earlier turns, which many templates leave out once later messages follow, is
    then learned."""
    train_split: str = Field(default="train", min_length=1)
    """Training uses this split of a hub dataset or directory."""
    eval_split: str = Field(default="test", min_length=1)
    """Evaluation uses this split of a hub dataset or directory."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """The reasoning_gym task, or datasets.load_dataset, gets these options."""

    @property
    def eval_sets(self) -> dict[str, str]:
        """The places of held-out examples by name, the first one first. One place without a name has the name ""."""
        if isinstance(self.eval, str):
            return {"": self.eval}
        if isinstance(self.eval, Mapping):
            return dict(self.eval)
        stems = [PurePath(path).stem for path in self.eval]
        names = stems if len({*stems}) == len(stems) else self.eval
        return dict(zip(names, self.eval, strict=True))

    def __post_init__(self) -> None:
        if not self.eval_sets or (not isinstance(self.eval, str) and not all(self.eval_sets.values())):
            raise ConfigError(f"data.eval = {self.eval!r}: expected a place, or several of which none is empty")
        if self.prompt_column is None and self.answer_column is None:
            raise ConfigError("data.prompt_column and data.answer_column are null: set one of the two")
