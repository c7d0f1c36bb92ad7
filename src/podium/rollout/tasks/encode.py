"""Encode examples as token ids: system prompt, chat template, the turns to learn, and prompts that are too long.

examples ─▶ text, by the chat template if there is one ─▶ token ids, in one array ─▶ kept on the disk
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, overload

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.bad_rows import SHOWN, BadRows, RowError
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.examples import answer_text
from podium.rollout.tasks.forms import Example, read_single
from podium.rollout.tasks.media import find_media, find_sign
from podium.rollout.tasks.messages import Messages, message_text
from podium.rollout.tasks.notes import (
    emit_notes,
    last_text,
    note_texts,
    note_turns,
    note_unlearned,
    note_unwritten,
    whole_text,
)
from podium.rollout.tasks.spans import find_mark, split_turns
from podium.spelling import write_count, write_share
from podium.telemetry import Note, Waiting, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

_FORM: Final = 9  # of the files of token ids and of what is checked; another one makes all earlier files unused
_FROM: Final = 2000  # examples; fewer are encoded in less time than a tokenizer is compared
_CODING: Final = ("utf-8", "surrogatepass")
_CHUNK: Final = 256  # examples that are written and encoded together
_LONGEST_ANSWER: Final = 4_000_000  # characters, about a million tokens
_EXAMINED: Final = 100  # texts with unknown characters that are looked at closely
_MEDIUM: Final = {"bytes": b"", "path": ""}  # stands for one, which may be large and of any type
_READ_ALWAYS: Final = frozenset({"tools"})  # columns of a row that its encoding and the checks may read
_READ_OF_ANSWERS: Final = frozenset({"answer", "completion"})  # further ones, where answers are encoded
_UNREAD: Final = frozenset({"place", "row", "answer", "preference", "source"})  # fields that are not read in full
_read_parts: Final = attrgetter(*(field.name for field in fields(Example) if field.name not in _UNREAD))


class TokenRows(Sequence[list[int]]):
    """Rows of token ids, or of their loss mask, in one array. Only a row that is asked for becomes a list.

    Attributes:
        values: The values of all rows, ``[N]``.
        offsets: Row i is ``values[offsets[i]:offsets[i + 1]]``: int64, one more than there are rows.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values = values
        self.offsets = offsets
        self._ends: Any = offsets.numpy()  # a number of it is read faster than one of a tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> list[int]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...
    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        return cast("list[int]", self.tensor(row).tolist())  # pyright: ignore[reportUnknownMemberType]

    def tensor(self, row: int) -> Tensor:
        """Return row ``row`` as a view, int ``[L]``. Raises IndexError."""
        rows = self._ends.size - 1
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of {rows}")
        row %= rows
        return self.values[self._ends[row] : self._ends[row + 1]]

    def take(self, rows: Sequence[int]) -> TokenRows:
        """These rows alone."""
        parts = [self.tensor(row) for row in rows]
        offsets = torch.tensor([0, *map(len, parts)], dtype=torch.int64).cumsum(0)
        return TokenRows(torch.cat(parts) if parts else self.values[:0], offsets)

    @property
    def lengths(self) -> list[int]:
        """Length of each row."""
        return self.offsets.diff().tolist()

    @property
    def digest(self) -> str:
        """A short text that other rows do not have."""
        values, offsets = cast("tuple[Any, Any]", (self.values.numpy(), self.offsets.numpy()))
        hasher = hashlib.blake2b(values, digest_size=16)
        hasher.update(offsets)
        return hasher.hexdigest()


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as token ids.

    Attributes:
        token_ids: A row of 1 to ``max_prompt_tokens`` ids for each kept prompt.
        kept: The index of each kept prompt's example.
        dropped: Number of examples that were left out because of their length.
        cut: Number of examples whose text was shortened.
        digest: A short text that other prompts do not have; "" if the template writes the same prompts differently at
            another time.
    """

    token_ids: TokenRows
    kept: list[int]
    dropped: int
    cut: int
    digest: str = ""


class EncodedExamples(Sequence[Any]):
    """Examples with their answers as token ids, of which a loss is computed: :class:`EncodedPairs`, or those of the
    recipe of a package.

    Attributes:
        examples: The example of each row.
    """

    examples: Sequence[Example]

    @property
    def row_lengths(self) -> list[int]:
        """The number of tokens of each row, with all its answers."""
        raise NotImplementedError

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the lines of a dry run on the first row."""
        del tokenizer
        yield f"number 0     {write_count(self.row_lengths[0], 'token')}"


class EncodedPairs(EncodedExamples):
    """Prompts with their answers: item i is ``(token_ids[i], loss_mask[i])``, two lists of equal length.

    Attributes:
        examples: The example of each item.
        digest: As that of :class:`EncodedPrompts`.
    """

    def __init__(
        self, token_ids: TokenRows, loss_mask: TokenRows, examples: Sequence[Example], digest: str = ""
    ) -> None:
        self.token_ids = token_ids
        self.loss_mask = loss_mask
        self.examples = examples
        self.digest = digest

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        return self.token_ids[row], self.loss_mask[row]

    @property
    def row_lengths(self) -> list[int]:
        return self.token_ids.lengths

    def take(self, rows: Sequence[int]) -> EncodedPairs:
        """These pairs alone."""
        ids, mask = self.token_ids.take(rows), self.loss_mask.take(rows)
        return EncodedPairs(ids, mask, [self.examples[row] for row in rows], ids.digest if self.digest else "")


def encode_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> EncodedPrompts:
    """Write each prompt as ``config`` says and encode it. Many examples are encoded once, and then kept on the disk.

    With a chat template a text becomes a user's message, a conversation is taken as it is, the system prompt goes
    before it, and the model's turn is opened. The template gets ``config.chat_template_kwargs``, and the tools of the
    row. Without a template, system prompt and prompt are plain text with an empty line between them, after the
    tokenizer's beginning-of-sequence token if the tokenizer uses one.

    A prompt of more than ``config.max_prompt_tokens`` is dropped, or its own text is cut from the front. The system
    prompt and the template stay whole.

    Raises:
        ConfigError: The template cannot be read or used, or a prompt is a conversation and there is no template.
        DataError: A prompt is empty, or every prompt is too long or unknown to the tokenizer.
    """
    encoder = ChatEncoder(tokenizer, config)
    stored = _read_or_encode(encoder, tokenizer, examples, BadRows(config.bad_rows))
    _check_unknown(encoder, examples, stored)
    unwritten = json.loads(bytes(stored["unwritten"].tolist()))
    emit_notes(note_unwritten(*unwritten), note_texts(examples, encoder, answers=False))
    dropped, cut = stored["counts"].tolist()
    rows = TokenRows(stored["values"], stored["offsets"])
    return EncodedPrompts(rows, stored["kept"].tolist(), dropped, cut, rows.digest if encoder.is_lasting else "")


def encode_pairs(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig, noun: str = "rows"
) -> EncodedPairs:
    """Encode prompts with their answers for supervised fine-tuning: ``(token_ids, loss_mask)`` of equal length.

    The prompt is encoded exactly as for generation. The answer's tokens follow, and the token that ends a turn: the
    chat template's, or the end-of-sequence token. The mask is True on answer and end. Of a conversation, it is True on
    every turn of the assistant. Prompts that are too long are dropped or cut as in :func:`encode_prompts`, and a note
    says how many. ``noun`` is what notes and errors call the examples.

    Raises:
        ConfigError: As :func:`encode_prompts`, no token ends an answer, or the template opens one
            where none is asked for.
        DataError: As :func:`encode_prompts`; or an answer is missing, vast, or neither text nor messages.
    """
    encoder = ChatEncoder(tokenizer, config)
    end = tokenizer.eos_token_id if encoder.end is None else encoder.end[1]
    if not isinstance(end, int):
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so a model could not learn to stop: set eos_token"
        )
    if not all(example.is_text for example in examples):
        encoder.check_opening()
    if config.split_turns:
        rows = [row for example in examples for row in split_turns(example)]
        emit(
            Note(
                f"data.split_turns makes {write_count(len(rows), 'row')} of {len(examples):,}, one for each turn "
                "that is learned"
            )
        )
        examples = rows
    if empty := sum(not _says_something(example) for example in examples):
        effect = ": the model learns to say nothing after these prompts"
        emit(
            Note(
                f"{write_share(empty, len(examples), 'answer', 'is', 'are')} empty{effect if noun != 'answers' else ''}"
            )
        )
    stored = _read_or_encode(encoder, tokenizer, examples, BadRows(config.bad_rows, noun), end)
    _check_unknown(encoder, examples, stored, answers=False)
    _check_unknown(encoder, examples, stored, answers=True)
    dropped, cut = stored["counts"].tolist()
    if dropped or cut:
        of = f" {noun}" if noun != "rows" else ""
        emit(Note(f"prompts too long: {dropped} dropped, {cut} cut, of {len(examples)}{of}"))
    unwritten = json.loads(bytes(stored["unwritten"].tolist()))
    emit_notes(note_turns(*stored["turns"].tolist()), note_unwritten(*unwritten))
    emit_notes(note_unlearned(examples), note_texts(examples, encoder, answers=True))
    rows = TokenRows(stored["values"], stored["offsets"])
    mask = TokenRows(stored["learned"].view(torch.bool), stored["offsets"])
    kept = [examples[index] for index in stored["kept"].tolist()]
    return EncodedPairs(rows, mask, kept, rows.digest if encoder.is_lasting else "")


def end_of_turn(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> int | None:
    """Return the id of the special token with which the chat template ends the assistant's turn; None if it has none.

    Raises:
        ConfigError: The template cannot be read or used.
    """
    end = ChatEncoder(tokenizer, config).end
    return None if end is None else end[1]


def _read_or_encode(
    encoder: ChatEncoder,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    bad: BadRows,
    end: int | None = None,
) -> dict[str, Tensor]:
    """Return what :class:`_Encoding` makes of examples, or what is kept of it on the disk, and tell of the rows that
    are left out."""
    count = len(examples) if encoder.is_lasting else 0
    kind, make = "prompts" if end is None else "pairs", _Encoding(encoder, examples, bad, end).run
    contents = map(_ExampleReducer(encoder, answers=end is not None).content, examples)
    stored = _read_or_compute(make, kind, tokenizer, encoder.settings, contents, count)
    if len(stored["bad"]):
        if not bad:  # it comes from the disk
            shown = [examples[index] for index in stored["bad"][:SHOWN].tolist()]
            with suppress(ConfigError, DataError):  # of which one was counted
                _Encoding(encoder, shown, bad, end).run()
        bad.tell(len(stored["bad"]), len(examples))
    return stored


def _read_or_compute(
    make: Callable[[], dict[str, Tensor]],
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    settings: object,
    contents: Iterable[object],
    count: int,
) -> dict[str, Tensor]:
    """Return ``make()``, or what it returned before for the same tokenizer, settings and contents.

    Files are in ``podium/tokens`` below ``HF_HOME``, under a digest of all that they depend on, and are mapped into
    memory. What is kept is never stale: another text, tokenizer or setting has another digest. A file that cannot be
    read is made again; one that cannot be written is left out. A tokenizer in plain Python cannot be compared, so its
    results are not kept.

    Args:
        make: Encodes the examples.
        kind: What is encoded.
        tokenizer: The tokenizer that encodes.
        settings: Further values on which the result depends. Its ``repr`` is compared.
        contents: The text of each example, in plain values. Its ``repr`` is compared.
        count: Number of the examples.
    """
    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    if count < _FROM or core is None:
        return make()
    identity = (type(tokenizer).__qualname__, tokenizer.special_tokens_map, core.to_str(), transformers.__version__)
    digest = hashlib.blake2b(repr((_FORM, kind, settings, identity)).encode(*_CODING), digest_size=20)
    for content in contents:
        digest.update(repr(content).encode(*_CODING))
    path = Path(constants.HF_HOME) / "podium" / "tokens" / f"{digest.hexdigest()}.safetensors"
    try:
        return load_file(path)
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError) as error:
        _logger.info("%s is made again: %s", path, error)
    made = make()
    aside = path.with_suffix(f".{secrets.token_hex(8)}.tmp")  # processes in two containers may have one number
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(made, aside)
        aside.replace(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        _logger.info("the token ids cannot be cached at %s, so the next run computes them again: %s", path, error)
        with suppress(OSError):
            aside.unlink()
        return made


def _check_unknown(
    encoder: ChatEncoder, examples: Sequence[Example], found: dict[str, Tensor], answers: bool | None = None
) -> None:
    """Tell of prompts, or of ``answers``, with characters that the tokenizer does not know. Raises DataError."""
    if encoder.unknown is None:
        kept = [examples[index] for index in found["kept"].tolist()]
        texts = [whole_text(example.prompt) if not answers else example.answer or "" for example in kept]
        encoder.check_lost("answer" if answers else "prompt", texts)
        return
    hits = found["values"].eq(encoder.unknown)
    if answers is not None:
        hits &= found["learned"].eq(answers)
    rows = torch.searchsorted(found["offsets"], hits.nonzero()[:, 0], right=True).sub(1).unique()
    places = found["kept"][rows[:_EXAMINED]].tolist()
    texts = [last_text(examples[index].prompt) if not answers else examples[index].answer or "" for index in places]
    encoder.check_unknown("answer" if answers else "prompt", texts, len(rows), len(found["kept"]))


def _check_answer(example: Example) -> None:
    row = example.row
    if (name := find_mark(row, example.fields)) is not None:
        raise DataError(
            f"column {name!r} holds {str(row[name])[:40]}, which seems to say that a part of the row is not learned or "
            "has another weight, and Podium does not read this column: remove such rows, or remove the column if it "
            "means something else. A turn of a conversation is left out by weight = 0 in its message"
        )
    if example.is_text:
        return
    if example.columns[1] == "answer" and (other := row.get("completion")) and answer_text(other) != example.answer:
        raise DataError(
            f"column 'answer' holds {str(example.answer)[:40]!r} and column 'completion' {str(other)[:40]!r}, and "
            "either may be what is to be learned: set data.answer_column to completion, or to '{answer}'"
        )
    if example.answer is None and not example.turns:
        raise DataError("there is no answer to learn; set data.answer_column, or take the row out")
    answer = read_single(example.row.get("answer", example.answer))
    if not example.turns and answer is not None and answer_text(answer) is None:
        raise DataError(
            f"the answer {str(answer)[:60]!r} ({type(answer).__name__}) is neither text nor messages; set "
            "data.answer_column to a column that holds what the model is to write"
        )
    length = sum(len(message_text(turn)) for turn in example.turns) or len(example.answer or "")
    if length > _LONGEST_ANSWER:
        raise DataError(
            f"the answer has {write_count(length, 'character')}, more than {_LONGEST_ANSWER:,}; take the row out"
        )


def check_media(example: Example, words: Collection[str], *, answer: bool = False) -> None:
    """Check that a row has no image, video or audio, and no sign of one in its text.

    Args:
        words: The texts that the tokenizer reads as one token of their own.
        answer: Whether the answer is learned.

    Raises:
        DataError: It has one.
    """
    if (column := find_media(example.row, example.fields)) is not None:
        raise DataError(
            f"column {column!r} holds an image, video or audio, which a model that is trained on text alone would not "
            "see; take the row or the column out"
        )
    prompt = example.prompt if isinstance(example.prompt, list) else [{"content": example.prompt}]
    texts = [message_text(message) for message in (*prompt, *example.turns)]
    if (sign := find_sign([*texts, (example.answer or "") if answer else ""], words)) is not None:
        raise DataError(
            f"the text has {sign!r}, which stands for an image, video or audio that Podium does not read; take the row "
            f"out, or put {sign!r} in quotes where the text only speaks of it"
        )


def _says_something(example: Example) -> bool:
    missing = example.answer is None and not example.turns  # of which the row's own error tells
    return missing or bool(example.answer) or any(message_text(t) or t.get("tool_calls") for t in example.turns)


class _ExampleReducer:
    """Reduces examples to what their encoding and its checks may read.

    They get nothing else of an example. All of it but the place decides which file of token ids is used. So no file
    hides what a check would refuse.

    Args:
        encoder: Says which columns the chat template would read.
        answers: Whether answers are encoded, too.
    """

    def __init__(self, encoder: ChatEncoder, *, answers: bool) -> None:
        self._names = _READ_ALWAYS | {*encoder.variables} | (_READ_OF_ANSWERS if answers else frozenset[str]())
        self._answers = answers

    def example(self, example: Example) -> Example:
        """A copy of an example with what is read."""
        answer = example.answer if self._answers else None
        return replace(example, row=self._read_row(example), answer=answer, preference=None, source="")

    def content(self, example: Example) -> tuple[Any, ...]:
        """What is read of an example, without its place."""
        return self._read_row(example), example.answer if self._answers else None, _read_parts(example)

    def _read_row(self, example: Example) -> Mapping[str, Any]:
        row, read, names = example.row, example.fields, self._names
        if self._answers and (mark := find_mark(row, read)) is not None:
            names = names | {mark}
        columns = {name: value for name, value in row.items() if name in names}
        if (medium := find_media(row, read)) is not None and medium not in columns:
            return {medium: _MEDIUM, **columns}
        return columns


_PromptIds = tuple[Example, "str | Messages", list[int]]


class _Encoding:
    """Encodes those of ``examples`` that are short enough or could be cut.

    Args:
        encoder: Writes prompts and answers.
        examples: The examples.
        bad: Counts the examples that cannot be used.
        end: The id that ends an answer, where answers are learned and have to fit, too.
    """

    def __init__(self, encoder: ChatEncoder, examples: Sequence[Example], bad: BadRows, end: int | None) -> None:
        self._encoder, self._examples, self._bad, self._end = encoder, examples, bad, end
        self._reducer = _ExampleReducer(encoder, answers=end is not None)
        self._kept: list[int] = []
        self._taken_out: set[int] = set()
        self._dropped = self._cut = 0

    def run(self) -> dict[str, Tensor]:
        """Return the ids of all rows, their mask where answers are learned, and what became of the examples.

        Raises:
            ConfigError, DataError: As :func:`encode_prompts`.
        """
        encoder, end = self._encoder, self._end
        values, learned, offsets = array("i"), array("b"), array("q", [0])
        if end is not None:
            encoder.turns[:] = [0] * 5
        for chunk in self._chunks():
            prompts = [prompt for _, prompt in chunk]
            rows = ((ids, ()) for _, _, ids in prompts) if end is None else encoder.answered(prompts, end)
            for (index, _), row in zip(chunk, rows, strict=True):
                if isinstance(row, tuple):
                    values.extend(row[0])
                    learned.extend(row[1])
                    offsets.append(len(values))
                else:
                    self._take_out(index, row)
        made = {
            "values": _tensor(values, torch.int32),
            "offsets": _tensor(offsets, torch.int64),
            "kept": torch.tensor([index for index in self._kept if index not in self._taken_out], dtype=torch.int64),
            "counts": torch.tensor([self._dropped, self._cut]),
            "bad": torch.tensor(sorted(self._taken_out), dtype=torch.int64),
            "unwritten": torch.tensor([*json.dumps(encoder.unwritten).encode()], dtype=torch.uint8),
        }
        answers = {} if end is None else {"learned": _tensor(learned, torch.int8), "turns": torch.tensor(encoder.turns)}
        return made | answers

    def _chunks(self) -> Iterator[list[tuple[int, _PromptIds]]]:
        """Yield, in chunks, the index of an example with the example, its prompt, which may have been cut, and the ids
        of the prompt."""
        encoder, examples, most = self._encoder, self._examples, self._encoder.config.max_prompt_tokens
        shortest: float = float("inf")
        for start in range(0, len(examples), _CHUNK):
            emit(Waiting(f"tokenizing {write_count(len(examples), 'example')}", start, len(examples)))
            places = range(start, min(start + _CHUNK, len(examples)))
            chunk: list[tuple[int, _PromptIds]] = []
            reduced = [self._reducer.example(examples[number]) for number in places]
            for index, example, tokens in zip(places, reduced, self._encode(reduced), strict=True):
                if isinstance(tokens, Exception):
                    self._take_out(index, tokens)
                    continue
                prompt: str | Messages = example.prompt
                shortest = min(shortest, len(tokens) if tokens is not None else shortest)
                if tokens is None or len(tokens) > most:
                    shorter = encoder.cut(example, tokens) if encoder.config.overlong == "cut" else None
                    if shorter is None:
                        self._dropped += 1
                        continue
                    self._cut += 1
                    prompt, tokens = shorter
                self._kept.append(index)
                chunk.append((index, (example, prompt, tokens)))
            yield chunk
            self._bad.check(places.stop)
        self._bad.settle(len(examples))
        if self._dropped and not self._kept:
            fact = f"the shortest has {shortest:.0f}" if shortest < float("inf") else "each has far more"
            raise DataError(
                f"each of the {write_count(self._dropped, 'prompt')} is longer than data.max_prompt_tokens = {most} "
                f"({fact}); raise it{'' if encoder.config.overlong == 'cut' else ', or set data.overlong to cut'}"
            )

    def _encode(self, examples: Sequence[Example]) -> Iterator[list[int] | RowError | None]:
        """Yield the ids of each prompt, None for one that is vast, or why the example cannot be used."""
        answers = self._end is not None
        for example, tokens in zip(examples, self._encoder.prompts(examples, answers=answers), strict=True):
            try:
                with example.name_in_errors():
                    if answers:
                        _check_answer(example)
                    elif example.is_text:
                        raise DataError(
                            f"column {example.columns[1]!r} is a text without a prompt, which only supervised "
                            "fine-tuning can use; set data.prompt_column to a column to generate from, or eval.items "
                            "to 0"
                        )
                    check_media(example, self._encoder.words, answer=answers)
                    if tokens == []:
                        raise DataError(f"the prompt {str(example.prompt)[:60]!r} has no tokens; take the row out")
            except (ConfigError, DataError) as error:
                yield error
            else:
                yield tokens

    def _take_out(self, index: int, error: RowError) -> None:
        """Leave out an example, which ``error`` names."""
        self._taken_out.add(index)
        self._bad.add(error)


def _tensor(values: array[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
