"""The completions of a run, a group at a time."""

import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from podium.errors import DataError
from podium.runs.run_files import RunFiles
from podium_view.numbers import number

__all__ = ["Completions", "CompletionsFile"]

_FILE: Final = re.compile(r"step-(\d{1,12})\.parquet")
_SCALARS: Final = ("reward", "advantage", "correct", "finish_reason", "version")
_GRADED: Final = ("reward", "correct", "finish_reason")
_TURN_COLUMNS: Final = ("turn_read", "turn_said", "turn_tokens", "turn_rewards")
_TOKEN_COLUMNS: Final = ("token_chars", "token_advantages", "token_mismatch", "token_versions", "token_kept")
_MOST_BYTES: Final = 512 << 20  # bytes in memory of what one answer reads of a file
_PROMPT_BYTES: Final = 32 << 20  # bytes of a step's prompts, above which the list of groups leaves them out
_HEAD: Final = 160  # characters of a prompt in the list of groups
_PAGE_TOKENS: Final = 100_000  # of the completions that one answer holds
_REMEMBERED: Final = 8  # steps whose rows are known


class Completions:
    """Reads the Parquet files of a run's steps. Each answer opens one file and reads the columns and rows it needs."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._known: OrderedDict[tuple[str, tuple[int, int]], list[set[int]]] = OrderedDict()

    def steps(self) -> list[int]:
        """The steps that have completions, in order."""
        return sorted(int(match[1]) for name in self._files.names("completions") if (match := _FILE.fullmatch(name)))

    def groups(self, step: int) -> dict[str, Any]:
        """Return the results of the completions of each prompt of ``step``.

        Returns:
            ``groups``, each with its number, ``n`` completions, the rewards' ``mean``, ``low`` and ``high``, how many
            are ``correct`` of those that are ``judged`` and how many ``cut`` off, and the head of the ``prompt``. All
            rows of one agent in a session are one completion. The reward has not judged those that it left out.

        Raises:
            DataError: The file cannot be read, or there is none.
        """
        with self._open(step) as file:
            present = set(file.names)
            wanted = [name for name in ("group", "session", "agent", *_GRADED) if name in present]
            if "prompt" in present and file.nbytes("prompt") <= _PROMPT_BYTES:
                wanted.append("prompt")
            table = file.read(wanted)
        nothing: list[Any] = [None] * len(table["group"])
        groups: dict[int, dict[str, Any]] = {}
        rewards: dict[int, list[float]] = {}
        last = {key: row for row, key in enumerate(_trajectories(table))}  # by the last row, which says how it ended
        for row in last.values():
            group = table["group"][row]
            if group is None:
                continue
            entry = groups.setdefault(group, {"group": group, "n": 0, "correct": 0, "judged": 0, "cut": 0})
            if entry["n"] == 0:
                entry["prompt"] = str(table.get("prompt", nothing)[row] or "")[:_HEAD]
            entry["n"] += 1
            verdict = table.get("correct", nothing)[row]
            entry["correct"] += verdict is True
            entry["judged"] += verdict is not None
            entry["cut"] += table.get("finish_reason", nothing)[row] == "length"
            reward = number(table.get("reward", nothing)[row])
            if reward is not None and math.isfinite(reward):
                rewards.setdefault(group, []).append(reward)
        for group, entry in groups.items():
            rewards_of_group = rewards.get(group, [])
            entry["mean"] = number(sum(rewards_of_group) / len(rewards_of_group)) if rewards_of_group else None
            entry["low"], entry["high"] = min(rewards_of_group, default=None), max(rewards_of_group, default=None)
        graded = any(value is not None for value in table.get("correct", nothing))
        return {"step": step, "graded": graded, "groups": [groups[group] for group in sorted(groups)]}

    def group(self, step: int, group: int, first: int = 0) -> dict[str, Any]:
        """Return the completions of one prompt of ``step``, from number ``first`` on: at least one, and at most 100,000
        tokens.

        Returns:
            ``prompt``, ``expected``, ``n`` completions in all, and ``rows``. A row has ``text``, ``reward``, ``parts``
            of the reward, the texts that it ``logged``, ``advantage``, ``correct``, ``finish_reason``, ``version``, the
            ids of its ``tokens``, and
            if the file has them, a list for each of ``chars`` (the number of characters that a token wrote),
            ``advantages``, ``mismatch``, ``versions`` and ``kept``. A list whose entries are all equal is replaced by
            this entry. A row of an environment's session also has the number of its ``session``, its ``agent``, and its
            ``turns``. A turn has the text that the model ``read`` before it, the numbers of ``characters`` and
            ``tokens`` of the answer, and the ``reward``.

        Raises:
            DataError: The file cannot be read, or there is no such group.
        """
        with self._open(step) as file:
            places = self._places(step, file)
            numbers = [index for index, groups in enumerate(places) if group in groups]
            if not numbers:
                raise DataError(f"step {step} has no group {group}")
            parts = [name for name in file.names if name.startswith("reward_")]
            logged = [name for name in file.names if name.startswith("logged_")]
            own_columns = ("completion", "session", "agent", *_SCALARS, *_TOKEN_COLUMNS, *_TURN_COLUMNS)
            columns = ("prompt", "expected", "tokens", *own_columns, *parts, *logged)
            wanted = [name for name in columns if name in file.names]
            table = file.read(wanted, numbers, group)
        count, nothing = len(table["tokens"]), [None] * len(table["tokens"])
        rows: list[dict[str, Any]] = []
        total = 0
        for index in range(first, count):
            total += len(table["tokens"][index] or ())
            if rows and total > _PAGE_TOKENS:
                break
            row_columns = {name: table.get(name, nothing)[index] for name in own_columns}
            reward_parts = {name.removeprefix("reward_"): number(table[name][index]) for name in parts}
            texts = {name.removeprefix("logged_"): table[name][index] for name in logged}
            rows.append({**_row(row_columns, table["tokens"][index], reward_parts), "logged": texts})
        prompt, expected = (str(table.get(name, nothing)[0] or "") for name in ("prompt", "expected"))
        return {"step": step, "group": group, "first": first, "n": count, "rows": rows} | {
            "prompt": prompt,
            "expected": expected if table.get("expected", nothing)[0] is not None else None,
        }

    def _open(self, step: int) -> "CompletionsFile":
        try:
            return CompletionsFile(self._files, ("completions", f"step-{step:06d}.parquet"))
        except FileNotFoundError:
            raise DataError(f"step {step} has no completions") from None

    def _places(self, step: int, file: "CompletionsFile") -> list[set[int]]:
        """Return the numbers of the groups in each row group of the file."""
        name = f"step-{step:06d}.parquet"
        key = (name, self._files.signature("completions", name))
        if key not in self._known:
            self._known[key] = [set(file.read(["group"], [index])["group"]) for index in range(file.chunks)]
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]


def _trajectories(table: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield for each row the trajectory that it belongs to: an agent's part of a session, or else the row itself."""
    nothing: list[Any] = [None] * len(table["group"])
    sessions, agents = table.get("session", nothing), table.get("agent", nothing)
    for row, of in enumerate(zip(table["group"], sessions, agents, strict=True)):
        yield of if of[1] is not None else (row,)


def _row(own: dict[str, Any], tokens: Any, parts: dict[str, float | None]) -> dict[str, Any]:
    row: dict[str, Any] = {"text": str(own["completion"] or ""), "tokens": list(tokens or ()), "parts": parts}
    row |= {"reward": number(own["reward"]), "advantage": number(own["advantage"]), "correct": own["correct"]}
    row |= {"finish_reason": own["finish_reason"], "version": own["version"]}
    for name in _TOKEN_COLUMNS:
        values = own[name]
        if isinstance(values, list) and len(values) == len(row["tokens"]):
            short = [number(value) for value in values]
            alike = bool(short) and name != "token_chars" and all(value == short[0] for value in short)
            row[name.removeprefix("token_")] = short[0] if alike else short
    if turns := _turns(own, len(row["tokens"])):
        text = "".join(own["turn_said"])
        row |= {"text": text, "turns": turns, "session": own["session"], "agent": own["agent"] or ""}
    return row


def _turns(own: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Return the turns of a row; [] if it has none, or if its columns contradict each other."""
    columns = [own[name] for name in _TURN_COLUMNS]
    if any(not isinstance(column, list) or len(column) != len(columns[0]) or None in column for column in columns):
        return []
    turns = [
        {"read": read, "characters": len(answer), "tokens": int(count), "reward": number(reward)}
        for read, answer, count, reward in zip(*columns, strict=True)
    ]
    return turns if sum(turn["tokens"] for turn in turns) == tokens else []


def _is_as_written(name: str, kind: Any) -> bool:
    """Whether a column has a type that Podium writes. Others count as absent."""
    from pyarrow import types

    def is_number(one: Any) -> bool:
        return types.is_integer(one) or types.is_floating(one)

    if name in ("group", "version", "session"):
        return types.is_integer(kind)
    if name in ("turn_read", "turn_said"):
        return types.is_list(kind) and types.is_string(kind.value_type)
    if name == "turn_tokens":
        return types.is_list(kind) and types.is_integer(kind.value_type)
    if name == "tokens" or name in (*_TOKEN_COLUMNS, *_TURN_COLUMNS):
        return types.is_list(kind) and is_number(kind.value_type)
    if name == "correct":  # of preferences 0.5 where both answers have the same reward
        return types.is_boolean(kind) or types.is_floating(kind)
    if name in ("reward", "advantage", "loss") or name.startswith("reward_"):
        return is_number(kind)
    is_text = name in ("prompt", "expected", "completion", "finish_reason", "agent") or name.startswith("logged_")
    return is_text and types.is_string(kind)


class CompletionsFile:
    """An open Parquet file. Raises DataError if it cannot be read, lacks a column that is needed, or would not fit in
    memory."""

    def __init__(self, files: RunFiles, names: Sequence[str], needed: Sequence[str] = ("group", "tokens")) -> None:
        import pyarrow as pa  # takes a third of a second, for which the first picture need not wait
        import pyarrow.parquet as pq

        self._path = "/".join(names)
        self._raw = file = files.open(*names)
        self._errors = (pa.ArrowException, OSError, ValueError)
        try:
            self._file = pq.ParquetFile(file)
            self.names = [field.name for field in self._file.schema_arrow if _is_as_written(field.name, field.type)]
        except self._errors as error:
            file.close()
            raise DataError(f"{self._path} cannot be read: {error}") from None
        if not {*needed} <= set(self.names):
            file.close()
            raise DataError(f"{self._path} lacks the columns {' and '.join(needed)}")
        self.chunks: int = self._file.num_row_groups

    def __enter__(self) -> "CompletionsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    def nbytes(self, *names: str, chunks: list[int] | None = None) -> int:
        """Return the number of bytes that the columns ``names`` take in memory, by the file's metadata."""
        metadata, total = self._file.metadata, 0
        for index in range(self.chunks) if chunks is None else chunks:
            chunk = metadata.row_group(index)
            columns = [chunk.column(number) for number in range(chunk.num_columns)]
            total += sum(
                column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in names
            )
        return total

    def read(self, names: list[str], chunks: list[int] | None = None, group: int | None = None) -> dict[str, list[Any]]:
        """Return the columns ``names`` as lists, optionally of some row groups (``chunks``) and of one ``group``."""
        chosen = list(range(self.chunks)) if chunks is None else chunks
        if self.nbytes(*names, chunks=chosen) > _MOST_BYTES:
            raise DataError(f"{self._path} needs more than {_MOST_BYTES >> 20} MiB of memory to be read")
        columns = list(dict.fromkeys(["group", *names]))
        try:
            table = self._file.read_row_groups(chosen, columns=columns, use_threads=False)
            if group is not None:
                import pyarrow.compute as pc

                table = table.filter(pc.field("group") == group)
            return {name: table.column(name).to_pylist() for name in columns}
        except self._errors as error:
            raise DataError(f"{self._path} cannot be read: {error}") from None
