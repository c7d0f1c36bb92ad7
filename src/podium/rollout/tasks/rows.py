"""Rows of JSON Lines and Parquet files and of datasets of the hub, each with the place that an error about it names."""

import difflib
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from podium.errors import DataError

__all__ = ["PlacedRow", "columns_hint", "dataset_rows", "find_files", "means_files", "read_rows", "split_names"]

PlacedRow = tuple[str, dict[str, Any]]
"""The place of a row, as in "train.jsonl, line 3", and its columns."""

_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".parquet")


def means_files(spec: str) -> bool:
    """Whether ``spec`` means files: it has the ending of one, is a pattern or a path, or names a file that exists."""
    path = Path(spec).expanduser()
    if spec.lower().endswith(_SUFFIXES) or glob.has_magic(spec) or path.is_file():
        return True
    return spec.startswith((".", "/", "~")) and not path.is_dir()


def find_files(spec: str) -> list[Path]:
    """Return the file, or a pattern's files, sorted. Raises DataError, which names the nearest, if none exists."""
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    if glob.has_magic(spec):
        found = sorted(match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file())
        if found:
            return found
    raise DataError(f"no file {spec}{_nearest(path)}")


def _nearest(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in _SUFFIXES)
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; {folder.resolve()} has {', '.join(near or names[:8]) or 'no data files'}"


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of one file.

    Raises:
        DataError: The file cannot be read, or a line is no JSON object. The message names the file, the line and the
            column, and what was expected there.
    """
    return _parquet(path) if path.suffix.lower() == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[PlacedRow]:
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield f"{path}, line {number}", _json_object(path, number, raw)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _json_object(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    place = f"{path}, line {number}"
    try:
        line = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}, byte {error.start + 1}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        if number == 1 and line.strip() == "[":
            raise DataError(f"{place}: a JSON array over many lines; {_ONE_A_LINE.format(path=path)}") from None
        near = line[max(0, error.pos - 20) : error.pos + 20].strip()
        what = error.msg.removeprefix("Expecting ")
        expected = f"expected {what}" if what != error.msg else error.msg
        raise DataError(
            f"{place}, column {error.pos + 1}: {expected}, near {near!r}; each line must be one whole JSON object"
        ) from None
    if not isinstance(row, dict):
        hint = f"; {_ONE_A_LINE.format(path=path)}" if isinstance(row, list) and number == 1 else ""
        raise DataError(f'{place}: expected a JSON object such as {{"prompt": "…"}}, found {_json_kind(row)}{hint}')
    return row


_ONE_A_LINE: Final = "write one object a line, as jq -c '.[]' {path} does"


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _parquet(path: Path) -> Iterator[PlacedRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet after row {number}: {error}") from error


def columns_hint(wanted: str, columns: Sequence[str]) -> str:
    """Say for an error about a missing column which columns exist, and which is the nearest."""
    near = difflib.get_close_matches(wanted, columns, n=1, cutoff=0.5)
    return f"the columns are {', '.join(map(repr, columns))}" + (f" (nearest: {near[0]!r})" if near else "")


def split_names(spec: str, options: Mapping[str, Any]) -> list[str]:
    """Return the dataset's splits. Raises DataError if there is no such dataset or it cannot be reached."""
    import datasets

    try:
        return list(datasets.get_dataset_split_names(spec, options.get("name"), revision=options.get("revision")))
    except Exception as error:  # network, hub, cache and format errors, of a dozen types of three libraries
        raise _unreadable(spec, options, error) from error


def dataset_rows(spec: str, split: str, options: Mapping[str, Any]) -> Iterator[PlacedRow]:
    """Yield the rows of one split. Raises DataError if there is no such dataset or split, or it cannot be reached."""
    import datasets

    names = split_names(spec, options)
    if split not in names:
        near = difflib.get_close_matches(split, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(
            f"{spec} has no split {split!r} but {', '.join(names)}{hint}; set data.train_split and data.eval_split"
        )
    try:
        loaded: Any = datasets.load_dataset(spec, split=split, **options)
    except Exception as error:  # as above
        raise _unreadable(spec, options, error) from error
    return ((f"{spec} [{split}], row {number}", dict(row)) for number, row in enumerate(loaded, start=1))


def _unreadable(spec: str, options: Mapping[str, Any], error: Exception) -> DataError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    given = f" with data.options = {dict(options)!r}" if options else ""
    return DataError(
        f"{spec}: neither a file nor a dataset that can be loaded{given}: {reason}. A file ends in .jsonl or .parquet; "
        "a subset of a hub dataset is named by data.options, as in {name: main}"
    )
