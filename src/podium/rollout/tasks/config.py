"""Settings of the data: where examples come from and how they become prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal, Self, cast

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError


@section("data")
class DataConfig:
    """The data, its columns, and how a prompt is written for the model."""

    train: str | tuple[str, ...] | Mapping[str, float] = ""
    """Training examples come from this file or glob (.jsonl, .json, .csv, .tsv, .parquet, .arrow), directory, hub
    dataset, or reasoning_gym:TASK; or from several of them: a list, or a mapping of each source to its weight, as in
    {math.jsonl: 3, code.jsonl: 1}. Each source gets the share of the prompts that its weight is of all weights. Without
    weights every row comes once an epoch."""
    eval: str | tuple[str, ...] | Mapping[str, str] = ""
    """Held-out examples come from this source, named as in data.train, or from several sources: a list of them, or a
    mapping of names to them. The first source judges the run unless eval.metric names another. An empty value means
    the share data.holdout of the training data, or the split data.eval_split of a hub dataset.
    """
    holdout: float = Field(default=0.1, ge=0, lt=1)
    """This share of the training data is held out for evaluation where there is no other held-out data."""
    train_items: int | None = Field(default=None, ge=1, le=10**12)
    """Training uses at most this many examples of each source. null means all of a file, and 10000 of a generated
    task."""
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
    """The reasoning_gym task, or datasets.load_dataset, gets these options. Where the keys are sources of the data,
    each source has its own, as in {"reasoning_gym:chain_sum": {min_terms: 3}}."""

    @property
    def train_sources(self) -> tuple[str, ...]:
        """The places of training examples, in the order of the configuration. No place is named where there is none."""
        if isinstance(self.train, str):
            return (self.train,) if self.train else ()
        return tuple(self.train)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each of several training sources, by its name. Without weights it is empty."""
        if not isinstance(self.train, Mapping) or len(self.train) == 1:
            return {}
        return dict(zip(self.source_names, self.train.values(), strict=True))

    @property
    def source_names(self) -> list[str]:
        """The name of each training source, which its examples carry where there are several."""
        return name_sources(self.train_sources)

    @property
    def shown_train(self) -> str:
        """The training sources and their weights as text for people."""
        return show_sources(self.train)

    def of_source(self, source: str) -> Self:
        """Return these settings with ``source`` alone in ``train`` and with its own options."""
        sources = {*self.train_sources, *self.eval_sets.values()}
        options = self.options
        if options and sources.issuperset(options) and all(isinstance(entry, Mapping) for entry in options.values()):
            options = options.get(source, {})
        return replace(self, train=source, options=options)

    @property
    def eval_sets(self) -> dict[str, str]:
        """The places of held-out examples by name, the first one first. One place without a name has the name ""."""
        if isinstance(self.eval, str):
            return {"": self.eval}
        if isinstance(self.eval, Mapping):
            return dict(self.eval)
        return dict(zip(name_sources(self.eval), self.eval, strict=True))

    def __post_init__(self) -> None:
        if not isinstance(self.train, str):
            sources = self.train_sources
            if not sources or not all(sources) or len({*sources}) < len(sources):
                raise ConfigError(
                    f"data.train = {self.train!r}: expected a source, or several of which none is empty or comes twice"
                )
        if not self.eval_sets or (not isinstance(self.eval, str) and not all(self.eval_sets.values())):
            raise ConfigError(f"data.eval = {self.eval!r}: expected a place, or several of which none is empty")
        if isinstance(self.train, Mapping):
            for source, weight in self.train.items():
                if weight <= 0:
                    raise ConfigError(f"data.train: {source} has the weight {weight:g}; expected a number above 0")
        if self.prompt_column is None and self.answer_column is None:
            raise ConfigError("data.prompt_column and data.answer_column are null: set one of the two")


def name_sources(sources: Sequence[str]) -> list[str]:
    """Return a name for each source: its file's name without the ending, or the whole source where these are equal."""
    stems = [PurePath(source).stem for source in sources]
    return stems if len({*stems}) == len(stems) else [*sources]


def show_sources(train: object) -> str:
    """Return the value of ``data.train`` as text for people: ``math.jsonl (weight 3), code.jsonl (weight 1)``."""
    if isinstance(train, Mapping):
        return ", ".join(
            f"{source} (weight {weight:g})" for source, weight in cast("Mapping[str, float]", train).items()
        )
    if isinstance(train, list | tuple):
        return ", ".join(map(str, cast("Sequence[object]", train)))
    return "" if train is None else str(train)
