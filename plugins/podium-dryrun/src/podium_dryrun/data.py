"""What a dry run shows of the data: notes, lengths, epochs, and the first example in the form that the model gets.

The data are read, checked and encoded as for the run. The run then finds the tokens on the disk.
"""

from __future__ import annotations

import heapq
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase

from podium.errors import PodiumError
from podium.rollout.tasks import DataConfig, EncodedExamples, EncodedPairs, Example
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.named_files import remarks
from podium.spelling import write_count
from podium.telemetry import Event, Note, subscribe
from podium.telemetry.formatting import percent, visible
from podium.trainer.prompts import HeldOut, Prompts, Tasks
from podium.trainer.run_setup import RunData

__all__ = ["count_row_tokens", "count_tokens", "describe_data", "describe_tokens", "describe_where"]

_SHOWN_CHARACTERS: Final = 1200
_SHOWN_TOKENS: Final = 48
_INDENT: Final = " " * 13


def describe_data(
    read_data: Callable[[], RunData[Any]], check_grader: Callable[[RunData[Any]], None] | None = None
) -> str:
    """Read the data of a run that has not started, and return a summary as text.

    Args:
        read_data: The ``read_data`` of a trainer.
        check_grader: Its ``check_grader``, so that what the run refuses of its rewards is refused here.

    Raises:
        ConfigError, DataError: The run cannot use the data or the rewards. The message names the place and the remedy.
        RewardError: A reward cannot be loaded.
    """
    heard: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            heard.append(event.text)

    unsubscribe = subscribe(hear)
    try:
        data = read_data()
        if check_grader is not None:
            check_grader(data)
    except PodiumError:
        sys.stderr.writelines(f"note: {visible(note)}\n" for note in heard)  # which say more of the error
        raise
    finally:
        unsubscribe()
    resume = data.config.run.resume
    notes = [] if resume in ("", "auto") else remarks(data.config, Path(resume))
    lines = ["# data", *(f"note         {visible(note)}" for note in (*notes, *heard))]
    return "\n".join([*lines, *_lengths(data), *_first(data)])


def count_tokens(data: RunData[Any]) -> list[int] | None:
    """Return the tokens of each prompt of the training data, or of each example with its answers.

    None: the prompts are tasks, from which an environment makes what the model reads.
    """
    examples = _examples(data)
    return None if isinstance(examples, Tasks) else _token_counts(examples)


def count_row_tokens(held_out: HeldOut) -> int:
    """Return the tokens of an evaluation set: of prompts, or of examples with their answers."""
    return sum(_token_counts(held_out))


def _lengths(data: RunData[Any]) -> Iterator[str]:
    config, examples = data.config, _examples(data)
    what, batch, count = "examples" if isinstance(config, SFTConfig) else "prompts", config.taken, len(examples)
    if isinstance(examples, Tasks):
        what = "tasks"
        yield f"training     {write_count(count, 'task')}"
    else:
        lengths = _token_counts(examples)
        index = max(range(count), key=lengths.__getitem__)
        longest = f"; the longest is number {index}" if lengths[index] > min(lengths) else ""
        yield f"training     {count:,} {what} of {_span(lengths)}{longest}"
    taken = config.run.steps * batch
    epochs = taken / count
    yield (
        f"epochs       {write_count(config.run.steps, 'step')} x {batch:,} {what} = {taken:,} of {count:,} = "
        f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    )
    yield from _sources(config.data, examples.examples, taken)
    if not isinstance(examples, Tasks):
        yield _most_tokens(config, _token_counts(examples))
    if data.held_out is not None:
        held_out = [length for examples in data.held_out.values() for length in _token_counts(examples)]
        kind = "examples" if data.config.scores_answers else "prompts"
        yield f"held-out     {len(held_out):,} " + ("tasks" if what == "tasks" else f"{kind} of {_span(held_out)}")


def _sources(data: DataConfig, examples: Sequence[Example], taken: int) -> Iterator[str]:
    """A line for each of several sources: its examples, its share of those that the run takes, and their epochs."""
    names = data.source_names
    counts = Counter(example.source for example in examples)
    weights: Mapping[str, float] = data.weights or counts
    for name, source in zip(names, data.train_sources, strict=True) if len(names) > 1 else ():
        share = weights[name] / sum(weights.values())
        epochs = taken * share / counts[name] if counts[name] else 0.0
        what = f"{counts[name]:,} of them, {percent(share)} of those taken, {epochs:.3g} epoch{'s' * (epochs != 1)}"
        yield f"source       {source}: {what}"


def _most_tokens(config: PPOConfig | SFTConfig, lengths: Sequence[int]) -> str:
    """The most tokens of a step: those of the longest rows of the data, and as many as may be sampled."""
    longest = sum(heapq.nlargest(config.taken, lengths))
    if isinstance(config, SFTConfig):
        return f"most tokens  {longest:,} a step"
    prompts, sampled = longest * config.sampling.n, config.rows * config.sampling.max_new_tokens
    return f"most tokens  {prompts + sampled:,} a step: {sampled:,} sampled, {prompts:,} of prompts"


def _token_counts(examples: HeldOut | Prompts) -> list[int]:
    """The tokens of each example, with all its answers."""
    if isinstance(examples, EncodedExamples):
        return examples.row_lengths
    if isinstance(examples, Prompts):
        return examples.token_ids.lengths
    return [len(prompt.token_ids) for prompt in examples]


def _examples(data: RunData[Any]) -> Prompts | EncodedExamples | Tasks:
    return cast("Prompts | EncodedExamples | Tasks", data.stream.examples)


def _span(lengths: Sequence[int]) -> str:
    if min(lengths) == max(lengths):
        return f"{write_count(lengths[0], 'token')} each"
    return f"{min(lengths):,} to {write_count(max(lengths), 'token')}, {sum(lengths) / len(lengths):,.0f} on average"


def _first(data: RunData[Any]) -> Iterator[str]:
    examples, tokenizer = _examples(data), data.tokenizer
    if isinstance(examples, Tasks):
        yield "number 0     the task, from which the environment makes what the model reads:"
        yield textwrap.indent(visible(str(examples.examples[0].row), _SHOWN_CHARACTERS), _INDENT, lambda line: True)
        return
    if isinstance(examples, EncodedExamples) and not isinstance(examples, EncodedPairs):
        yield from examples.describe_first(tokenizer)
        return
    ids = [*examples.token_ids[0]]
    first = examples.examples[0]
    if first.place:
        yield describe_where(first)
    if isinstance(examples, EncodedPairs):
        learned = [token for token, counts in zip(ids, examples.loss_mask[0], strict=True) if counts]
        yield from describe_tokens("number 0", f"{write_count(len(ids), 'token')}, with the answer:", tokenizer, ids)
        yield from describe_tokens("to learn", f"{len(learned)} of these tokens:", tokenizer, learned)
        mask = [*examples.loss_mask[0], False]
        ends = dict.fromkeys(ids[at] for at in range(len(ids)) if mask[at] and not mask[at + 1])
        yield f"ends         a learned turn ends with {' or '.join(repr(tokenizer.decode([token])) for token in ends)}"
    else:
        yield from describe_tokens(
            "number 0", f"{write_count(len(ids), 'token')}, as the model reads them:", tokenizer, ids
        )
        answer = examples.examples[0].answer
        yield f"answer       {'none' if answer is None else repr(visible(answer, _SHOWN_CHARACTERS))}"


def describe_where(example: Example, also: Sequence[str] = ()) -> str:
    """Say which columns of the row are prompt and answer, and which are not read, here or as those of ``also``."""
    prompt, answer = example.columns
    if example.is_text:
        parts = f"every token of {answer!r} is learned"
    else:
        parts = f"prompt {prompt!r}"
        parts += f", answer {answer!r}" if answer else ", answer the last turn" if example.turns else ", no answer"
    read = {"tools", *also, *example.fields, *(field.partition(".")[0] for field in example.fields)}
    unread = [repr(name) for name in example.row if name not in {*read, "prompt", "answer"}]
    text = visible(f"{example.place}: {parts}" + (f"; not read: {', '.join(unread)}" if unread else ""))
    return textwrap.fill(text, 110, initial_indent="read from    ", subsequent_indent=_INDENT)


def describe_tokens(name: str, title: str, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Iterator[str]:
    """The text of ``ids`` under a title, and its tokens one by one."""
    yield f"{name:<12} {title}"
    yield textwrap.indent(visible(str(tokenizer.decode(ids)), _SHOWN_CHARACTERS), _INDENT, lambda line: True)
    pieces = " ".join(repr(tokenizer.decode([token])) for token in ids[:_SHOWN_TOKENS])
    more = f" and {len(ids) - _SHOWN_TOKENS:,} more" if len(ids) > _SHOWN_TOKENS else ""
    yield textwrap.fill(f"{pieces}{more}", 110, initial_indent="tokens       ", subsequent_indent=_INDENT)
