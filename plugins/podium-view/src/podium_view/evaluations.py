"""The completions of held-out prompts, by evaluation set and step."""

import hashlib
import re
from collections import Counter, OrderedDict
from contextlib import suppress
from statistics import fmean
from typing import Any, Final
from urllib.parse import unquote

from podium.errors import DataError
from podium.runs.files import SET
from podium.runs.run_files import RunFiles
from podium.spelling import write_count
from podium_view.completions import CompletionsFile
from podium_view.numbers import number

__all__ = ["Evaluations"]

_FILE: Final = re.compile(r"step-(\d{1,12})\.parquet")
_FOLDER: Final = "evaluations"
_HEAD: Final = 160  # characters of a prompt in the list of prompts
_COLUMNS: Final = ("prompt", "completion", "expected", "correct", "reward", "loss", "finish_reason", "session", "agent")
_FIGURES: Final = ("reward", "correct", "loss")
_REMEMBERED: Final = 2  # files whose rows are known: what is compared


class Evaluations:
    """Reads the Parquet files of a run's evaluations."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._known: OrderedDict[tuple[tuple[str, ...], tuple[int, int]], list[dict[str, Any]]] = OrderedDict()

    def sets(self) -> list[dict[str, Any]]:
        """Return the sets that were evaluated, each with its ``name`` ("" if it has none) and its ``steps``."""
        return [
            {"name": unquote(folder[1].removeprefix(SET)) if folder[1:] else "", "steps": steps}
            for folder, steps in self._folders()
        ]

    def prompts(self, place: int, step: int) -> dict[str, Any]:
        """Return the results of each prompt of the set number ``place`` at ``step``.

        Returns:
            ``rows``, each with the head of its ``prompt``, the number ``n`` of its completions or sessions, the mean of
            their ``reward``, the share that is ``correct``, the ``loss`` of the answer where none was drawn, and a
            ``key``, by which the same prompt is found in another step.

        Raises:
            DataError: The file cannot be read, or there is none.
        """
        names = ("key", "n", *_FIGURES)
        rows = self._rows(place, step)
        return {"rows": [{name: row[name] for name in names} | {"prompt": row["prompt"][:_HEAD]} for row in rows]}

    def answer(self, place: int, step: int, row: int) -> dict[str, Any]:
        """The row number ``row`` of :meth:`prompts`, with its whole ``prompt``, ``expected``, and ``answers``, of which
        each has ``completion``, ``correct``, ``reward``, ``loss`` and ``finish_reason``.

        Raises:
            DataError: As :meth:`prompts`, or there is no such row.
        """
        rows = self._rows(place, step)
        if row >= len(rows):
            raise DataError(f"step {step} evaluated {write_count(len(rows), 'prompt')}")
        return rows[row]

    def _folders(self) -> list[tuple[tuple[str, ...], list[int]]]:
        folders: list[tuple[str, ...]] = [(_FOLDER,)]
        folders += [(_FOLDER, name) for name in self._files.names(_FOLDER) if name.startswith(SET)]
        steps_by_folder: list[tuple[tuple[str, ...], list[int]]] = []
        for folder in folders:
            with suppress(DataError, OSError):  # a link, or a file with the name of a folder
                matches = (_FILE.fullmatch(name) for name in self._files.names(*folder))
                if steps := sorted(int(match[1]) for match in matches if match):
                    steps_by_folder.append((folder, steps))
        return steps_by_folder

    def _rows(self, place: int, step: int) -> list[dict[str, Any]]:
        folders = self._folders()
        if place >= len(folders) or step not in folders[place][1]:
            raise DataError(f"the run has no evaluation number {place} of step {step}")
        path = (*folders[place][0], f"step-{step:06d}.parquet")
        key = (path, self._files.signature(*path))
        if key not in self._known:
            with CompletionsFile(self._files, path, needed=("group", "prompt")) as file:
                table = file.read([name for name in _COLUMNS if name in file.names])
            self._known[key] = _by_prompt(table)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _by_prompt(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return a row for each prompt, with its answers and the means of their figures. A session is represented by the
    first row of its client.

    A key consists of a hash of the prompt's text and the number of the prompt among those with this text. For sessions,
    it is the number of the task, because other sessions may have failed."""
    nothing: list[Any] = [None] * len(table["group"])
    columns = [table.get(name, nothing) for name in _COLUMNS]
    rows: dict[int, dict[str, Any]] = {}
    sessions = set[int]()
    by_agent = sorted(zip(table["group"], *columns, strict=True), key=lambda row: bool(row[-1]))  # the client first
    for group, *values in by_agent:
        prompt, completion, expected, correct, reward, loss, finish_reason, session, _ = values
        if group is None or session in sessions:
            continue
        if session is not None:
            sessions.add(session)
        answer = {"completion": str(completion or ""), "correct": None if correct is None else number(float(correct))}
        answer |= {"reward": number(reward), "loss": number(loss), "finish_reason": finish_reason}
        row = rows.setdefault(group, {"prompt": str(prompt or ""), "expected": expected, "answers": []})
        row["answers"].append(answer)
    texts = Counter[str]()
    for group, row in sorted(rows.items()):  # completions that the reward left out stand last in the file
        text, answers = row["prompt"], row["answers"]
        occurrence = texts[text] if not sessions else group
        texts[text] += 1
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()
        row |= {"key": f"{digest}-{occurrence}", "n": len(answers)}
        for name in _FIGURES:
            figures = [answer[name] for answer in answers if answer[name] is not None]
            row[name] = number(fmean(figures)) if figures else None
    return [rows[group] for group in sorted(rows)]
