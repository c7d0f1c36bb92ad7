"""The completions that one call of an engine draws, and what was drawn of those that are not finished, in a file that
outlives the process that draws them.

    engine ──what it drew, once a second──▶ file ◀──read── the engine that continues after the first one was lost

A completion is known by its seed and its prompt. Each line of the file has further tokens of one completion:

    {"seed": 4711, "at": 0, "prompt": 3632233996, "ids": [7], "logprobs": [-0.1], "versions": [3]}
    {"seed": 4711, "at": 1, "ids": [5, 9], "logprobs": [-0.5, -1.25], "versions": [3, 3]}

With top-k or top-p a line also has the ids ``kept`` for each of its tokens. A line at 0 begins the completion anew, and
has the checksum of its prompt.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from podium.rollout.engines.draw import seed_at
from podium.rollout.engines.requests import Event, Failed, Finished, Request, RequestId, RowOfBatch
from podium.rollout.sampling import Completion, FinishReason, KeptSet, SamplingParams
from podium.telemetry.progress import Counting

REPORT_EVERY_S: Final = 1.0
_KEEP_S: Final = 30.0  # a finished completion stays for so long, until another process has it for certain
_MOST_BYTES: Final = 1 << 24  # a longer file is written again without finished completions
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """The first tokens of a completion: ids, log-probabilities, versions of the weights, and the kept ids if any.

    ``prompt_sum`` is the checksum of the prompt that they continue, or None where that is known to be the right one.
    ``top`` are the rows of :attr:`.Completion.top`, which files do not have.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    kept: list[list[int]] | None = None
    prompt_sum: int | None = field(default=None, compare=False)
    top: list[Tensor] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def of(completion: Completion) -> Drawn:
        """The tokens of a whole completion."""
        kept = completion.kept
        kept_ids = None if kept is None else [kept.at(index).tolist() for index in range(len(completion))]
        columns = (completion.token_ids, completion.logprobs, completion.versions)
        token_ids, logprobs, versions = (column.tolist() for column in columns)
        return Drawn(token_ids, logprobs, versions, kept_ids, top=None if completion.top is None else [*completion.top])

    def ended(self, params: SamplingParams) -> FinishReason | None:
        """Why the completion is whole; None where tokens are missing."""
        if self.token_ids[-1] in params.stop_token_ids:
            return "stop"
        return "length" if len(self) >= params.max_new_tokens else None

    def completion(self, reason: FinishReason, rest: Completion | None = None) -> Completion:
        """The completion that these tokens begin and ``rest`` continues."""
        more = Drawn([], [], [], None) if rest is None else Drawn.of(rest)
        kept = None
        if self.kept is not None:
            kept_ids = self.kept + (more.kept or [])
            sizes = torch.tensor([0, *map(len, kept_ids)], dtype=torch.int64)
            kept = KeptSet(torch.tensor([id for ids in kept_ids for id in ids], dtype=torch.int64), sizes.cumsum(0))
        return Completion(
            token_ids=torch.tensor(self.token_ids + more.token_ids, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs + more.logprobs, dtype=torch.float32),
            finish_reason=reason,
            versions=torch.tensor(self.versions + more.versions, dtype=torch.int64),
            kept=kept,
            top=None if self.top is None else torch.stack(self.top + (more.top or [])).cpu(),
        )


class Journal:
    """The file at ``path``, which one process writes. Any thread may call. Where the disk refuses, nothing is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._lengths: dict[int, int] = {}  # by seed, the number of tokens in the lines
        self._prompt_sums: dict[int, int | None] = {}  # by seed, the checksum of the prompt
        self._done: dict[int, float] = {}  # by seed of a finished completion, the time of its end
        self._lines: list[bytes] = []  # those that are not in the file
        self._bytes, self._limit = 0, _MOST_BYTES
        self._refused = False

    def begin(self, seed: int, drawn: Drawn | None = None, prompt_sum: int | None = None) -> None:
        """Begin a completion, of which ``drawn`` was drawn elsewhere, and forget what was noted under this seed.
        ``prompt_sum`` is the checksum of its prompt."""
        with self._lock:
            if self._refused:
                return
            self._lengths[seed], self._prompt_sums[seed] = 0, prompt_sum
            self._done.pop(seed, None)
        if drawn is not None:
            self.add(seed, drawn)

    def add(self, seed: int, drawn: Drawn, at: int = 0) -> None:
        """Take those tokens of the completion ``seed`` that are not here. ``drawn`` are the ones from ``at`` on."""
        with self._lock:
            length = self._lengths.get(seed, 0)
            new = slice(length - at, None)
            if length < at or len(drawn) <= length - at or self._refused:
                return
            line: dict[str, Any] = {"seed": seed, "at": length}
            line |= {} if length else {"prompt": self._prompt_sums.get(seed)}
            line |= {"ids": drawn.token_ids[new], "logprobs": drawn.logprobs[new], "versions": drawn.versions[new]}
            if drawn.kept is not None:
                line["kept"] = drawn.kept[new]
            self._lines.append(json.dumps(line).encode() + b"\n")
            self._lengths[seed] = at + len(drawn)

    def flush(self) -> None:
        """Write the file. The operating system keeps it also when this process is killed."""
        with self._lock:
            if self._refused or not self._lines:
                return
            lines, self._lines = self._lines, []
            try:
                with self.path.open("ab" if self._bytes else "wb") as file:
                    file.writelines(lines)
                self._bytes += sum(map(len, lines))
                if self._bytes > self._limit:
                    self._shorten()
                    self._limit = max(_MOST_BYTES, 2 * self._bytes)
            except OSError as error:
                self._refused = True
                for table in (self._lengths, self._prompt_sums, self._done):
                    table.clear()
                _logger.warning(
                    "%s cannot be written (%s): if a worker is lost, its completions are generated "
                    "again from the start",
                    self.path,
                    error,
                )

    def finished(self, seeds: Iterable[int]) -> None:
        """Note that these completions are whole and leave this process."""
        with self._lock:
            if not self._refused:
                self._done.update(dict.fromkeys(seeds, time.monotonic()))

    def _shorten(self) -> None:
        """Write the file again without completions that finished some time ago."""
        now = time.monotonic()
        finished = {seed for seed, ended in self._done.items() if now - ended >= _KEEP_S}
        lines = [line for line in self.path.read_bytes().splitlines(True) if json.loads(line)["seed"] not in finished]
        aside = self.path.with_name(f"{self.path.name}.new")  # another rank has a file of its own
        aside.write_bytes(b"".join(lines))
        aside.replace(self.path)
        self._bytes = sum(map(len, lines))
        for seed in finished:
            self._lengths.pop(seed, None)
            self._prompt_sums.pop(seed, None)
            del self._done[seed]


class Rows:
    """The completions of one call, some of which another engine may have begun.

    Attributes:
        count: Counts those that are finished.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        journal: Journal | None,
        begun: Mapping[int, Drawn],
        cut: Callable[[Completion], Completion] | None = None,
    ) -> None:
        self.seeds: dict[RequestId, int] = {RowOfBatch(index, params.n): seed for index, seed in enumerate(seeds)}
        self._prompts = [tuple(prompt) for prompt in prompts]  # one object for the n requests of a prompt
        self._params, self._journal = params, journal
        self._cut = cut or (lambda completion: completion)
        begun = {} if params.record_top or params.record_experts else begun  # journals have neither
        needs_sums = journal is not None or bool(begun)
        sums = [prompt_sum for prompt in prompts for prompt_sum in [checksum(prompt) if needs_sums else 0] * params.n]
        self.heads = {
            row: head
            for (row, seed), prompt_sum in zip(self.seeds.items(), sums, strict=True)
            if (head := begun.get(seed)) is not None and head.prompt_sum in (None, prompt_sum)
        }
        self.completions = {
            row: self._cut(head.completion(reason))
            for row, head in self.heads.items()
            if (reason := head.ended(params))
        }
        self.count = Counting("completions", len(seeds))
        if journal is not None:
            for (row, seed), prompt_sum in zip(self.seeds.items(), sums, strict=True):
                journal.begin(seed, self.heads.get(row), prompt_sum)
            if self.heads:
                journal.flush()  # what was reported of them is in this process alone

    def missing(self) -> list[Request]:
        """The requests for what is not drawn yet."""
        requests: list[Request] = []
        for index, (row, seed) in enumerate(self.seeds.items()):
            prompt, params, head = self._prompts[index // self._params.n], self._params, self.heads.get(row)
            if row in self.completions:
                continue
            if head is not None:
                prompt, seed = (*prompt, *head.token_ids), seed_at(seed, len(head))
                params = replace(params, max_new_tokens=params.max_new_tokens - len(head))
            requests.append(Request(id=row, prompt=prompt, params=params, seed=seed, reuse_completions=False))
        return requests

    def take(self, event: Event) -> None:
        """Note a completion that is finished. Raises the error of one that failed."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            head, rest = self.heads.get(event.id), event.completion
            completion = self._cut(head.completion(rest.finish_reason, rest) if head else rest)
            self.completions[event.id] = completion
            self.count.done = len(self.completions)
            if self._journal is not None:
                self._journal.add(self.seeds[event.id], Drawn.of(completion))

    @property
    def done(self) -> bool:
        """Whether all completions are whole."""
        return len(self.completions) == len(self.seeds)


def checksum(prompt: Sequence[int]) -> int:
    """A number that other prompts most probably do not have. Seeds alone are not enough: a stage that draws twice for a
    step gives other prompts the same seeds."""
    return crc32(np.array(prompt, np.int64).tobytes())


def read_journals(path: str) -> Mapping[int, Drawn]:
    """Read the journals of a group: the file at ``path``, and those of further ranks, which end with their number."""
    first = Path(path)
    files = [first, *sorted(first.parent.glob(f"{first.name}.*[0-9]"))]
    return {seed: draft for file in files for seed, draft in read_journal(file).items()}


def read_journal(path: Path) -> Mapping[int, Drawn]:
    """Read what a process, which may have been killed, had drawn of each completion; {} where there is no file.

    A line that is not whole does not count, nor what follows in its completion.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    drafts: dict[int, Drawn] = {}
    for line in data.splitlines():
        try:
            entry = json.loads(line)
            if entry["seed"] not in drafts or entry["at"] == 0:
                drafts[entry["seed"]] = Drawn([], [], [], [] if "kept" in entry else None, entry.get("prompt"))
            draft = drafts[entry["seed"]]
            sizes = {
                len(entry[name]) for name in ("ids", "logprobs", "versions", *(("kept",) if "kept" in entry else ()))
            }
            if entry["at"] != len(draft) or len(sizes) != 1:
                continue
            draft.token_ids.extend(entry["ids"])
            draft.logprobs.extend(entry["logprobs"])
            draft.versions.extend(entry["versions"])
            if draft.kept is not None:
                draft.kept.extend(entry["kept"])
        except (ValueError, KeyError, TypeError):
            continue
    return {seed: draft for seed, draft in drafts.items() if len(draft)}
