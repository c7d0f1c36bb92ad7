"""Rows of preferences: pairs of a better and a worse answer, or answers with labels, as the field writes them.

prompt, chosen, rejected       texts, messages, or whole conversations      ─┐
chosen, rejected               conversations with a common beginning        ─┼─▶ Example with a Preference ─▶ token ids
prompt, completion, label      KTO's                                        ─┘
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from podium.errors import DataError
from podium.rollout.tasks.bad_rows import name_place
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.encode import EncodedExamples, EncodedPairs, TokenRows, encode_pairs
from podium.rollout.tasks.examples import map_columns
from podium.rollout.tasks.forms import (
    CONVERSATIONS,
    NESTED_PROMPTS,
    Example,
    Preference,
    columns_hint,
    columns_of_pair,
    has_column,
    is_template,
    list_preference_pairs,
    read_messages,
    split_name,
)
from podium.spelling import write_count, write_share
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EncodedPreference", "EncodedPreferences", "encode_preferences", "list_answers"]
__all__ += ["read_labeled", "read_pair"]

_FIGURE: Final = re.compile(
    r"(^|.*[_-])(scores?|ratings?|rewards?|grades?|quality|utility|elo|points|likes|votes)([_-].*|$)"
)
"""Names of columns with a figure that is the higher, the better an answer is."""
_RANK: Final = re.compile(r"(^|.*_)rank(ing)?(_.*|$)")
"""Names of columns with a figure that is the lower, the better an answer is."""
_SPEAKER: Final = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_LABELS: Final = {"true": True, "false": False}
_ROLES: Final = {"Human": "user", "Assistant": "assistant"}


class EncodedPreference(NamedTuple):
    """The answers to a prompt.

    Attributes:
        answers: The token ids of prompt and answer, and the mask of the answer's tokens, of each. The better answer of
            a pair comes first.
        chosen: Whether each is the better one, or a desirable one.
        margin: By how much the first is better; None where the data do not say.
    """

    answers: tuple[tuple[list[int], list[bool]], ...]
    chosen: tuple[bool, ...]
    margin: float | None


class EncodedPreferences(EncodedExamples):
    """Rows of preferences as token ids.

    Attributes:
        answers: The answers of all rows, one row after the other.
        starts: The place of the first answer of each row, and the number of all answers.
        examples: The example of each row.
    """

    def __init__(self, answers: EncodedPairs, starts: Sequence[int], examples: Sequence[Example]) -> None:
        self.answers = answers
        self.starts = starts
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        row = range(len(self))[row]
        places, preference = range(self.starts[row], self.starts[row + 1]), self.examples[row].preference
        assert preference is not None
        chosen = (preference.desirable,) if preference.rejected is None else (True, False)
        return EncodedPreference(tuple(self.answers[index] for index in places), chosen, preference.margin)

    @property
    def token_ids(self) -> TokenRows:
        """The ids of each answer with its prompt."""
        return self.answers.token_ids

    @property
    def digest(self) -> str:
        """As that of :class:`.EncodedPairs`."""
        return self.answers.digest

    @property
    def row_lengths(self) -> list[int]:
        """The number of tokens of all answers of each row, with their prompts."""
        return self.token_ids.offsets[list(self.starts)].diff().tolist()

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        from podium_dryrun.data import describe_tokens, describe_where

        row, example = self[0], self.examples[0]
        answers = list_answers(example)
        columns = [column for answer in answers for column in answer.fields] + ["label", "margin"]
        for (ids, mask), chosen, answer in zip(row.answers, row.chosen, answers, strict=True):
            if answer.place:
                yield describe_where(answer, columns)
            name = "better" if chosen else "worse"
            yield from describe_tokens(
                name, f"{write_count(len(ids), 'token')}, of which {sum(mask)} are the answer's:", tokenizer, ids
            )
        if row.margin is not None:
            yield f"margin       {row.margin:g}"

    @property
    def longest(self) -> list[int]:
        """The number of tokens of the longest answer of each row, with its prompt."""
        lengths = self.token_ids.lengths
        return [max(lengths[start:stop]) for start, stop in zip(self.starts, self.starts[1:], strict=False)]

    def take(self, rows: Sequence[int]) -> EncodedPreferences:
        """These rows alone."""
        places = [index for row in rows for index in range(self.starts[row], self.starts[row + 1])]
        examples = [self.examples[row] for row in rows]
        return EncodedPreferences(self.answers.take(places), _starts(examples), examples)

    def with_answers(self, answers: EncodedPairs) -> EncodedPreferences:
        """The same rows with their answers encoded in another way."""
        return EncodedPreferences(answers, self.starts, self.examples)


def _starts(examples: Sequence[Example]) -> list[int]:
    starts = [0]
    for example in examples:
        starts.append(starts[-1] + len(list_answers(example)))
    return starts


def list_answers(example: Example) -> list[Example]:
    """Return the examples of the answers of a row: the better one first."""
    preference = example.preference
    return [example] if preference is None or preference.rejected is None else [example, preference.rejected]


# -- rows ------------------------------------------------------------------------------------------------------------


def read_pair(place: str, row: dict[str, Any], config: DataConfig) -> Example:
    """Return the example of a pair of answers.

    ``data.answer_column`` names the better answer; by default it is ``chosen``, or what other data call it. The worse
    answer stands in the column of the corresponding name. Without a column for the prompt, the two conversations have
    it in common.

    Raises:
        DataError: The row has no such pair, or the pair is malformed.
    """
    better, worse = _find_pair(place, row, config)
    column = config.prompt_column
    if column not in (None, "prompt") and not is_template(column, row) and not has_column(row, column):
        hint = columns_hint(column, row)
        raise DataError(f"{place}: no column {column!r} for the prompt; {hint}; set data.prompt_column")
    tied = _check_figures(place, row, better, worse)
    row = {**row, **{name: _listed(row[name], place, name) for name in (better, worse)}}
    if config.prompt_column == "prompt" and not any(
        has_column(row, name) and row.get(name) is not None for name in ("prompt", *CONVERSATIONS, *NESTED_PROMPTS)
    ):
        row = _with_common_prompt(place, row, better, worse)
    chosen, rejected = (_read_answer(place, row, name, replace(config, answer_column=name)) for name in (better, worse))
    if chosen.prompt != rejected.prompt:
        raise DataError(
            f"{place}: the conversations in {better!r} and {worse!r} differ before the answer: the prompt of one is "
            f"{str(chosen.prompt)[:60]!r}, and of the other {str(rejected.prompt)[:60]!r}; repair the row"
        )
    return replace(chosen, preference=Preference(rejected, margin=_read_margin(place, row), tied=tied))


def read_labeled(place: str, row: dict[str, Any], config: DataConfig) -> Example:
    """Return the example of an answer with the column ``label``, true or false, or of a pair of answers.

    Raises:
        DataError: The row is neither, or malformed.
    """
    if "label" not in row:
        return read_pair(place, row, config)
    label = row["label"]
    if isinstance(label, str) and label.lower() in _LABELS:
        label = _LABELS[label.lower()]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise DataError(
            f"{place}: column 'label' holds {str(row['label'])[:60]!r} ({type(row['label']).__name__}); expected true "
            "for an answer that is desirable, or false"
        )
    row = {name: _listed(value, place, name) if name == "completion" else value for name, value in row.items()}
    example = map_columns(place, {name: value for name, value in row.items() if name != "label"}, config)
    if example.answer is None and not example.turns:
        raise DataError(
            f"{place}: there is no answer beside column 'label': expected a column completion, or another that "
            "data.answer_column names"
        )
    # The label is that of one answer: a conversation is learned from its last turn alone.
    return replace(example, preference=Preference(desirable=bool(label)), whole=example.is_text)


def _find_pair(place: str, row: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    if config.answer_column not in (None, "answer"):
        pair = columns_of_pair(config.answer_column, row)
        if pair is None:
            raise DataError(
                f"{place}: data.answer_column = {config.answer_column!r} is not the better answer of a pair: expected "
                "a column such as chosen, with rejected beside it"
            )
        return pair
    pairs = list_preference_pairs(row)
    if len(pairs) > 1:
        names = "; ".join(" and ".join(pair) for pair in pairs)
        raise DataError(
            f"{place}: {write_count(len(pairs), 'pair')} of columns may hold the answers: {names}; set "
            f"data.answer_column to the better answers, such as {pairs[0][0]}"
        )
    if pairs:
        return pairs[0]
    if "label" in row:
        raise DataError(
            f"{place}: column 'label' says whether the answer is a good one, and there is no second answer to compare "
            "it with; labels are learned by podium train dpo --algorithm.loss kto"
        )
    raise DataError(
        f"{place}: there is no pair of answers: expected the columns chosen and rejected; the columns are "
        f"{', '.join(row) or 'none'}. data.answer_column names the better answer of a pair"
    )


def _check_figures(place: str, row: Mapping[str, Any], better: str, worse: str) -> bool:
    """Check that no two columns with figures of the answers, such as score_chosen and score_rejected, say that the
    worse answer is better. Returns whether all of them say that both are equally good. Raises DataError."""
    ties: list[bool] = []
    parts = [split_name(name) for name in (better, worse)]
    words = [next((word for word in mine if word not in other), "") for mine, other in (parts, parts[::-1])]
    for name, figure in row.items() if all(words) else ():
        rises = _RANK.fullmatch("_".join(split_name(name))) is None
        if rises and not _FIGURE.fullmatch("_".join(split_name(name))):
            continue
        other = name
        if isinstance(figure, Mapping):  # scores: {chosen: 9, rejected: 3}
            values = [cast("Mapping[str, Any]", figure).get(word) for word in words]
            name, other = (f"{name}.{word}" for word in words)
        elif words[0] in split_name(name):
            swapped = [words[1] if word == words[0] else word for word in split_name(name)]
            other = next((column for column in row if split_name(column) == swapped), name)
            values = [figure, row[other]] if other != name else []
        else:
            continue
        figures = [read for value in values if (read := _read_figure(value)) is not None]
        if len(figures) == 2:
            ties.append(figures[0] == figures[1])
        if len(figures) == 2 and (figures[0] < figures[1] if rises else figures[0] > figures[1]):
            raise DataError(
                f"{place}: {name} = {figures[0]:g} is {'less' if rises else 'more'} than {other} = {figures[1]:g}, so "
                "that the pair would teach the worse answer: exchange the answers, take both columns out if they do "
                "not say which answer is better, or leave such rows out with data.bad_rows drop"
            )
    return bool(ties) and all(ties)


def _read_figure(value: Any) -> float | None:
    """Return a number, or that of a text, which CSV files have; None for anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _read_answer(place: str, row: dict[str, Any], column: str, config: DataConfig) -> Example:
    example = map_columns(place, row, config)
    return replace(example, place=f"{place}, column {column!r}")


def _listed(value: Any, place: str, column: str) -> Any:
    """Return an answer as text or messages: a message alone is a conversation of one, and a transcript one of many."""
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, str) and (turns := _read_transcript(value)):
        return turns
    with name_place(place):
        return read_messages(value, column)


def _read_transcript(text: str) -> list[dict[str, Any]]:
    """Return the messages of a transcript with the signs of HH-RLHF; [] for any other text."""
    head, *parts = _SPEAKER.split(text)
    if head.strip() or len(parts) < 4 or parts[0] != "Human":
        return []
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": said.strip()} for speaker, said in pairs]


def _with_common_prompt(place: str, row: dict[str, Any], better: str, worse: str) -> dict[str, Any]:
    """Return the row with the prompt that its two conversations have in common."""
    chosen, rejected = row[better], row[worse]
    for name, value in ((better, chosen), (worse, rejected)):
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in cast("list[Any]", value)):
            raise DataError(
                f"{place}: column {name!r} holds {str(value)[:60]!r} ({type(value).__name__}), and there is no column "
                "'prompt'; set data.prompt_column, or write whole conversations as lists of messages"
            )
    most = min(len(chosen), len(rejected))
    count = next((at for at in range(most) if chosen[at] != rejected[at]), most - 1)
    while count > 0 and not all(turns[count].get("role") == "assistant" for turns in (chosen, rejected)):
        count -= 1
    if not count:
        raise DataError(
            f"{place}: the conversations in {better!r} and {worse!r} have no common beginning before an answer of the "
            "assistant, which would be the prompt; repair the row, or add a column 'prompt'"
        )
    return {**row, "prompt": chosen[:count]}


def _read_margin(place: str, row: Mapping[str, Any]) -> float | None:
    margin = row.get("margin")
    if margin is None or (isinstance(margin, float) and math.isnan(margin)):
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(
            f"{place}: column 'margin' holds {str(margin)[:60]!r} ({type(margin).__name__}); expected a finite number, "
            "by how much the better answer is better"
        )
    if margin < 0:
        raise DataError(
            f"{place}: column 'margin' holds {margin:g}, so that the worse answer would be the better one: exchange "
            "the answers, or leave such rows out with data.bad_rows drop"
        )
    return float(margin)


# -- token ids -------------------------------------------------------------------------------------------------------


def encode_preferences(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> EncodedPreferences:
    """Encode rows of preferences. Each answer is encoded as :func:`.encode_pairs` encodes it.

    A pair of which one answer cannot be used is left out as a whole. So is a pair of equal answers, from which nothing
    is learned. Notes say how many.

    Raises:
        ConfigError, DataError: As :func:`.encode_pairs`; or no row is left, or only some rows have a margin.
    """
    flat = [answer for example in examples for answer in list_answers(example)]
    encoded = encode_pairs(flat, tokenizer, replace(config, split_turns=False), "answers")
    kept = {id(example): number for number, example in enumerate(encoded.examples)}
    rows: list[Example] = []
    places: list[int] = []
    halves = equal = 0
    for example in examples:
        at = [kept.get(id(answer)) for answer in list_answers(example)]
        present = [index for index in at if index is not None]
        if len(present) < len(at):
            halves += bool(present)
        elif len(at) == 2 and encoded.token_ids[present[0]] == encoded.token_ids[present[1]]:
            equal += 1
        else:
            rows.append(example)
            places += present
    if halves:
        emit(Note(f"{write_count(halves, 'pair is', 'pairs are')} left out, of which only one answer can be used"))
    if equal:
        emit(
            Note(
                f"{write_share(equal, len(examples), 'pair', 'has', 'have')} two equal answers and "
                f"{'is' if equal == 1 else 'are'} left out: they teach nothing"
            )
        )
    if not rows:
        raise DataError(
            f"none of the {write_count(len(examples), 'row')} of preferences can be used: see the notes above"
        )
    single = sum(len(list_answers(row)) == 1 for row in rows)
    if 0 < single < len(rows):
        raise DataError(
            f"{single:,} of {write_count(len(rows), 'row')} "
            f"{'is an answer with a label' if single == 1 else 'are answers with labels'}, and the others are pairs: "
            "give either, in data of their own"
        )
    if tied := sum(row.preference is not None and row.preference.tied for row in rows):
        emit(
            Note(
                f"{tied:,} of {write_count(len(rows), 'pair')} have answers of equal scores or ranks: their columns "
                "(such as chosen and rejected) alone say which answer is better; remove such rows if they are ties"
            )
        )
    _tell_labels(rows)
    with_margin = sum(row.preference is not None and row.preference.margin is not None for row in rows)
    if 0 < with_margin < len(rows):
        raise DataError(
            f"column 'margin' has a number in {with_margin:,} of {write_count(len(rows), 'row')}: give all rows one, "
            "0 where no margin is known, or take the column out"
        )
    return EncodedPreferences(encoded.take(places), _starts(rows), rows)


def _tell_labels(rows: Sequence[Example]) -> None:
    """Tell of answers of which all have one label, and of rows that others contradict."""
    labels: dict[tuple[str, str], set[str | bool]] = {}
    for row in rows:
        preference = row.preference
        assert preference is not None
        if preference.rejected is None:
            labels.setdefault((str(row.prompt), _write(row)), set()).add(preference.desirable)
        else:
            pair = _write(row), _write(preference.rejected)
            labels.setdefault((str(row.prompt), "\0".join(sorted(pair))), set()).add(pair[0])
    if contradicted := sum(len(marks) > 1 for marks in labels.values()):
        better = write_count(contradicted, "answer or pair is the better one", "answers or pairs are the better ones")
        emit(Note(f"{better} in one row, and the worse one{'s' * (contradicted > 1)} in another"))
    marks = {mark for several in labels.values() for mark in several}
    if len(marks) == 1 and len(rows) > 1 and isinstance(mark := next(iter(marks)), bool):
        emit(
            Note(
                f"all {write_count(len(rows), 'answer')} have the label {str(mark).lower()}: answers of both labels "
                "are needed"
            )
        )


def _write(answer: Example) -> str:
    return str([*answer.turns]) if answer.turns else str(answer.answer)
