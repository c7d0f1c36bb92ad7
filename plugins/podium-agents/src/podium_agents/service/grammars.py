"""Grammars over a model's own tokens, by the library ``llguidance`` of the extra ``grammar``.

    Lark text ── compile ──▶ grammar ── begin ──▶ guide ── allowed ──▶ mask of ids ── accept(id) ──▶ ...
                 (cached)              (a copy)

The library knows bytes. A token's bytes are what the tokenizer's decoder makes of it. Special tokens have none: a
grammar names them by ids, as in ``<[151657]>``. The end of a completion is an id of its own behind the vocabulary, for
which the stop tokens of the request stand. Text that a grammar leaves no choice about is written in the tokenizer's own
tokens.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from podium.errors import ConfigError, GenerationError
from podium.extras import install_command

__all__ = ["Grammars", "Spelling", "token_bytes"]

_CACHED: Final = 64  # compiled grammars
_TRIAL_S: Final = 2  # of processor time, and a hundred times of waiting on a busy machine
_TRIAL_BYTES: Final = 2 << 30
_TRIALS: Final = 2  # at the same time
_MOST_CHARACTERS: Final = 1 << 18  # of a grammar
_LIMITS: Final[Mapping[str, Any]] = {
    "max_lexer_states": 50_000,  # of about 2 kB each
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "verbose_errors": False,  # which would print the schema
}
"""What one grammar may cost: a token some 20 ms, and its states 100 MB at the very most."""
_TRIAL: Final = """
import json, re, resource, sys
limits, seconds, nbytes, path = json.loads(sys.argv[1])
sys.path.append(path)
for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, nbytes)):
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):  # as for memory on macOS
        pass
import llguidance
texts, errors = json.loads(sys.stdin.buffer.read()), []
named = re.findall("[0-9]+", " ".join(re.findall(r"<\\[([0-9, -]+)\\]>", " ".join(texts))))
end = 1 + max([255, *(int(number) for number in named if len(number) < 8)])
class Bytes:
    eos_token_id, bos_token_id, special_token_ids = end, None, list(range(256, end + 1))
    tokens = [bytes([id]) if id < 256 else b"<[%d]>" % id for id in range(end + 1)]
    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)
core = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
for text in texts:
    matcher = llguidance.LLMatcher(core, text, log_level=0, limits=llguidance.LLParserLimits(**limits))
    errors.append(matcher.get_error())
    for step in range(0 if errors[-1] or len(texts) > 1 else 64):
        mask = matcher.compute_bitmask()
        allowed = [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        if not allowed or not matcher.consume_token(allowed[step * 7919 % len(allowed)]):
            break
    if matcher.is_error() and not errors[-1]:
        errors[-1] = "the grammar is too complex to be followed: " + matcher.get_error()
print(json.dumps(errors))
"""
"""Compiles grammars over single bytes. The library bounds neither time nor memory of regular expressions with large
counts."""


class Grammars:
    """Compiles grammars for one tokenizer. Any thread may call.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock, self._trials = tokenizer, threading.Lock(), threading.Semaphore(_TRIALS)
        self._compiled: dict[str, Future[_Compiled]] = {}

    def compile(self, text: str) -> _Compiled:
        """Return the grammar of a text in the library's form of Lark.

        Raises:
            ConfigError: The extra is not installed, or the grammar is wrong, too large, or none that the vocabulary can
                write.
        """
        if len(text) > _MOST_CHARACTERS:
            raise ConfigError(f"the grammar has {len(text)} characters; {_MOST_CHARACTERS} are the limit")
        with self._lock:
            future = self._compiled.pop(text, None)
            is_new = future is None
            future = future or Future()
            self._compiled[text] = future  # as the latest
            while len(self._compiled) > _CACHED:
                del self._compiled[next(iter(self._compiled))]
        if is_new:  # others that want the same wait for it
            try:
                future.set_result(self._make(text))
            except BaseException as error:
                future.set_exception(error)
                raise
        try:
            return future.result()
        except ConfigError as error:
            raise ConfigError(str(error)) from None

    def _make(self, text: str) -> _Compiled:
        if error := self.find_errors([text])[0]:
            raise ConfigError(error)
        vocabulary = self._vocabulary
        matcher = self._library.LLMatcher(vocabulary.core, text, log_level=0, limits=self._limits)
        compiled = _Compiled(matcher, vocabulary)
        if matcher.is_error():
            raise ConfigError(_explain(matcher.get_error()))
        try:
            compiled.begin(()).allowed()
        except GenerationError as error:
            raise ConfigError(str(error)) from None
        return compiled

    def find_errors(self, texts: Sequence[str]) -> list[str]:
        """Return what is wrong with each of several grammars, whatever the vocabulary; "" for nothing.

        A process that the kernel ends in time compiles them over single bytes. A single one is followed for some steps.

        Raises:
            ConfigError: They take too much time or memory.
        """
        path = str(Path(self._library.__file__).parents[1])
        command = [sys.executable, "-I", "-c", _TRIAL, json.dumps([dict(_LIMITS), _TRIAL_S, _TRIAL_BYTES, path])]
        try:
            with self._trials:
                trial = subprocess.run(
                    command,
                    input=json.dumps(texts).encode(),
                    capture_output=True,
                    timeout=100 * _TRIAL_S,
                    env={},
                    check=False,
                )
        except subprocess.TimeoutExpired:
            trial = None
        if (
            trial is not None and trial.returncode > 0 and b"MemoryError" not in trial.stderr
        ):  # such as an installation that cannot be imported
            reason = trial.stderr.decode(errors="replace").strip()[-300:]
            raise ConfigError(f"the process that tries a grammar failed: {reason}")
        if trial is None or trial.returncode:
            raise ConfigError(
                f"the grammar took more than {_TRIAL_S} s of processor time or {_TRIAL_BYTES >> 30} GiB of memory to "
                "compile; lower the counts of its repetitions, or the number of its alternatives"
            )
        return [_explain(error) if error else "" for error in json.loads(trial.stdout)]

    @property
    def writes_everything(self) -> bool:
        """Whether the vocabulary has a token for every single byte."""
        return self._vocabulary.writes_everything

    def can_write(self, text: str) -> bool:
        """Whether the vocabulary has tokens for all of a text."""
        return self._vocabulary.encode(text.encode()) is not None

    @functools.cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError:
            command = install_command("grammar", "llguidance", package="podium-agents")
            raise ConfigError(f"structured output needs llguidance, which is not installed: {command}") from None
        return llguidance

    @functools.cached_property
    def _limits(self) -> Any:
        return self._library.LLParserLimits(**_LIMITS)

    @functools.cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._library)


class _Compiled:
    """A grammar that is ready to guide completions."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def begin(self, stop_token_ids: Sequence[int]) -> _MatcherGuide:
        """As :meth:`.Grammar.begin`."""
        return _MatcherGuide(self._matcher.deep_copy(), self._vocabulary.end, stop_token_ids)


class _MatcherGuide:
    """Follows one completion through a grammar."""

    def __init__(self, matcher: Any, end: int, stop_token_ids: Sequence[int]) -> None:
        self._matcher, self._end, self._stops, self._over = matcher, end, {*stop_token_ids}, False

    def allowed(self) -> bytes:
        """As :meth:`.Guide.allowed`.

        Raises:
            GenerationError: No token can go on with the text, or the grammar has become too complex.
        """
        mask = bytearray(self._matcher.compute_bitmask())
        reason = self._matcher.stop_reason()
        if self._matcher.is_error() or reason == "NoExtensionBias":
            raise GenerationError(_explain(self._matcher.get_error(), reason))
        byte, bit = divmod(self._end, 8)
        may_end = mask[byte] >> bit & 1
        mask[byte] &= ~(1 << bit)
        if may_end:
            mask.extend(bytes(max(0, max(self._stops, default=0) // 8 + 1 - len(mask))))
            for token_id in self._stops:
                mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        """As :meth:`.Guide.accept`."""
        self._over = self._over or token_id in self._stops
        if not self._over and not self._matcher.consume_token(token_id):
            raise GenerationError(_explain(self._matcher.get_error()))


class _Vocabulary:
    """A tokenizer's tokens, as the library reads them.

    Attributes:
        core: The library's object.
        end: The id that stands for the end of a completion.
    """

    def __init__(self, tokenizer: Any, library: Any) -> None:
        self._tokenizer, self._tokens = tokenizer, token_bytes(tokenizer)
        self.end = self.eos_token_id = len(self._tokens)
        self.bos_token_id = None
        self.special_token_ids = [id for id, token in enumerate(self._tokens) if not token]
        self._by_bytes = {token: id for id, token in reversed([*enumerate(self._tokens)]) if token}
        self.writes_everything = all(bytes([byte]) in self._by_bytes for byte in range(256))
        self._longest = max(map(len, self._by_bytes), default=0)
        self.special_token_ids.append(self.end)
        self.tokens = [token or f"<[{id}]>".encode() for id, token in enumerate(self._tokens)] + [b"<[end]>"]
        self.core = library.LLTokenizer(library.TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        """The ids of a text that a grammar leaves no choice about.

        Raises:
            ValueError: The vocabulary cannot write it, which the library reports as the error of the grammar.
        """
        content = text.encode() if isinstance(text, str) else text
        ids = self.encode(content)
        if ids is None:
            if content == b"test":  # by which the library finds out whether it may give bytes
                return []
            raise ValueError(f"{_UNWRITABLE}{content.decode(errors='replace')!r}")
        return ids

    def encode(self, content: bytes) -> list[int] | None:
        """The tokenizer's own ids of a text; the longest ones that fit where those do not spell it; None for none."""
        text = content.decode(errors="ignore")
        if text.encode() == content:
            for anchor in ("", "a"):  # sentencepiece writes a space before the first word
                ids: list[int] = self._tokenizer.encode(anchor + text, add_special_tokens=False)
                ids = ids[len(self._tokenizer.encode(anchor, add_special_tokens=False)) if anchor else 0 :]
                if b"".join(self._tokens[id] for id in ids if id < self.end) == content:
                    return ids
        ids, at = [], 0
        while at < len(content):
            lengths = range(min(self._longest, len(content) - at), 0, -1)
            piece = next((part for n in lengths if (part := content[at : at + n]) in self._by_bytes), None)
            if piece is None:
                return None
            ids.append(self._by_bytes[piece])
            at += len(piece)
        return ids


_UNWRITABLE: Final = "the vocabulary has no tokens for "


class Spelling:
    """The bytes that ids of a tokenizer stand for within a text. Special tokens stand for none."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self._tokenizer, self._added = tokenizer, {id: token.content for id, token in added.items()}
        self._special = {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        written = "" if decoder is None else decoder.__getstate__().decode()
        self._has_bytes, self._falls_back = "ByteLevel" in written, "ByteFallback" in written
        self._spelled: dict[int, bytes] = {}

    def bytes_of(self, id: int) -> bytes:
        """The bytes of an id; b"" for one that stands for none."""
        if id not in self._spelled:
            token = None if id in self._special else self._tokenizer.convert_ids_to_tokens(id)
            self._spelled[id] = b"" if token is None else self.spell(id, token)
        return self._spelled[id]

    def spell(self, id: int, token: str) -> bytes:
        """The bytes of an id whose token the vocabulary writes so."""
        if self._has_bytes:
            bytes_of = _bytes_of_characters()
            is_spelled = id not in self._added and all(character in bytes_of for character in token)
            return bytes(bytes_of[c] for c in token) if is_spelled else self._added.get(id, token).encode()
        if self._falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        before, text = self._anchor
        return _decode(self._tokenizer, [before, id]).removeprefix(text).encode()

    @functools.cached_property
    def plain(self) -> Mapping[int, str]:
        """The tokens that stand for bytes, by id."""
        return {id: token for token, id in self._tokenizer.get_vocab().items() if id not in self._special}

    @functools.cached_property
    def _anchor(self) -> tuple[int, str]:
        """An id after which others are decoded as within a text, and its text."""
        short = (id for id, token in self.plain.items() if len(token) == 1 and token.isalnum())
        before = next(short, next(iter(self.plain), 0))
        return before, _decode(self._tokenizer, [before])


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return the bytes that each id of a tokenizer stands for within a text; b"" for ids that stand for none."""
    spelling = Spelling(tokenizer)
    tokens = [b""] * (max(tokenizer.get_vocab().values(), default=-1) + 1)
    for id, token in spelling.plain.items():
        tokens[id] = spelling.spell(id, token)
    return tokens


def _decode(tokenizer: Any, ids: Iterable[int]) -> str:
    return tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@functools.cache
def _bytes_of_characters() -> Mapping[str, int]:
    """The byte that each character of a byte-level token stands for, as in GPT-2: visible ones for themselves, the rest
    for characters from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def _explain(error: str, reason: str = "") -> str:
    """The library's error in a sentence, without its traces."""
    if _UNWRITABLE in error:
        rest = error.split(_UNWRITABLE, 1)[1]
        return _UNWRITABLE + rest.split("')")[0].split('")')[0][:200]
    if reason == "NoExtensionBias":
        return "no token of the vocabulary can go on with the text that the grammar asks for"
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith("<")]
    first = " ".join(lines[:1]) or reason or "the grammar cannot be followed"
    return first.partition(": ")[2] if first.startswith("at ") else first
