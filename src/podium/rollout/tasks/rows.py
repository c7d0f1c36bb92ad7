"""Rows of files and of datasets of the hub, each with the place that an error about it names."""

import bz2
import csv
import difflib
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, cast

from podium.errors import ConfigError, DataError
from podium.exceptions import read_text
from podium.extras import explain_packages
from podium.functions import find_installed, load_installed
from podium.hub import explain_offline, look_for_hub
from podium.plain_values import explain_json
from podium.spelling import suggest_nearest, write_count
from podium.telemetry import Note, emit

PlacedRow = tuple[str, dict[str, Any] | DataError]
"""The place of a row, as in "train.jsonl, line 3", and its columns, or why it has none."""

_TASKS: Final = "podium.tasks"  # the group of entry points that generate rows
_Binary = io.BufferedReader | gzip.GzipFile
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst")
_TEXTS: Final = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_SUFFIXES: Final = (*_TEXTS, *(text + packed for text in _TEXTS for packed in _PACKED), ".parquet", ".arrow")
_SIGNS: Final = {  # the first bytes of files that are no text
    b"\x1f\x8b": "a file of gzip (.gz)",
    **{b"BZh%d1AY&SY" % size: "a file of bzip2 (.bz2)" for size in range(1, 10)},
    b"\xfd7zXZ\0": "a file of xz (.xz)",
    b"\x28\xb5\x2f\xfd": "a file of Zstandard (.zst)",
    b"\x04\x22\x4d\x18": "a file of LZ4",
    b"PK\3\4": "a ZIP archive, which .xlsx files are, too",
    b"PAR1\x15": "a Parquet file (.parquet)",
    b"ARROW1\0": "an Arrow file (.arrow)",
    b"SQLite format 3\0": "a database of SQLite",
}
TOKEN_IDS: Final = re.compile(r"(\w+_)?(input|token|prompt|completion|response|chosen|rejected)_ids")
"""Names of columns that hold token ids, if they hold numbers."""
OPEN: Final = ("tools", "tool_calls")
"""Fields whose entries have fields of their own."""
_ROWS: Final = 1000  # of a dataset that are in memory at a time
_LONGEST_FIELD: Final = 2**31 - 1  # of a CSV file; Python's own limit of 128 KiB is less than a long document


def is_generated(spec: str) -> bool:
    """Whether ``spec`` names a task that a package generates, as in ``reasoning_gym:chain_sum``."""
    return spec.startswith("reasoning_gym:") or find_generator(spec) is not None


def find_generator(spec: str) -> EntryPoint | None:
    """Return the entry point that generates the task ``spec``; None if no installed package has it.

    Raises:
        ConfigError: Several packages have one of this name.
    """
    name, sign, _ = spec.partition(":")
    return find_installed(_TASKS, name, "data.train") if sign else None


def generate_rows(spec: str, options: Mapping[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the columns of problems, as many as are taken. The same seed gives the same problems.

    The function of an entry point of the group ``podium.tasks``, whose name stands before the colon of ``spec``, makes
    them of these arguments.

    Raises:
        ConfigError: No installed package generates such tasks, or this one with these options.
    """
    if (entry := find_generator(spec)) is None:
        name = spec.partition(":")[0]
        raise ConfigError(
            f"{spec} needs a package that generates the tasks of {name}, and none is installed: "
            f"{explain_packages(_TASKS, name)}"
        )
    return load_installed(entry, "data.train")(spec, options, seed)


def means_files(spec: str) -> bool:
    """Whether ``spec`` means files: it has the ending of one, is a pattern or a path, or names a file that exists.

    A directory is none, also where its name has such an ending, as Spark gives it one.
    """
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        return False
    if spec.lower().endswith(_SUFFIXES) or glob.has_magic(spec) or os.path.isfile(path):
        return True
    return spec.startswith((".", "/", "~"))


def find_files(spec: str) -> list[Path]:
    """Return the file, or a pattern's files, sorted. Raises DataError, which names the nearest, if none exists."""
    path = Path(os.path.expanduser(spec))
    if os.path.isfile(path):
        return [path]
    if glob.has_magic(spec):
        files = sorted(match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file())
        if files:
            return files
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"no file {spec}: it is a link to {os.readlink(path)}, which does not exist")
    raise DataError(f"no file {spec}{_nearest(path)}")


def _nearest(path: Path) -> str:
    folder = path.parent
    while not os.path.isdir(folder):
        path, folder = folder, folder.parent
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIXES) or os.path.isdir(folder / name))
    except OSError as error:
        return f"; {folder.resolve()} cannot be listed: {error.strerror}"
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; {folder.resolve()} has {', '.join(near or names[:8]) or 'no data files'}"


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of one file: JSON Lines, a JSON array, CSV or TSV (each may be packed by gzip, bzip2, xz or
    Zstandard), Parquet, or Arrow.

    Values are as the file has them. Nothing is guessed from a text, so a CSV field stays the text ``007``. In place of
    a malformed row comes a DataError, which names the file, the line and the column, and what was expected there.

    Raises:
        DataError: The file cannot be read.
    """
    name = path.name.lower()
    if name.endswith((".parquet", ".arrow")):
        yield from _arrow(path)
        return
    packed = next((suffix for suffix in _PACKED if name.endswith(suffix)), "")
    name = name.removesuffix(packed)
    try:
        with _open_packed(path, packed) as file:
            if kind := next((kind for sign, kind in _SIGNS.items() if file.peek(64).startswith(sign)), ""):
                raise DataError(
                    f"{path} is no text: it begins as {kind}; unpack it, or give it the ending of what it is"
                )
            if name.endswith((".csv", ".tsv")):
                yield from _csv(path, file, "," if name.endswith(".csv") else "\t")
            elif name.endswith(".json") and file.peek(64).lstrip(_BLANK).startswith(b"["):
                yield from _json_array(path, file.read())
            else:
                yield from _json_lines(path, file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # gzip's own errors are of the first three kinds
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _open_packed(path: Path, packed: str) -> _Binary:
    if packed and not path.stat().st_size:
        raise EOFError("it has no bytes, but a compressed file has some even if its content is empty")
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(cast(Any, pyarrow.input_stream(str(path), compression="zstd")))
    if packed in (".bz2", ".xz"):
        return io.BufferedReader(_Streams(path, bz2.BZ2Decompressor if packed == ".bz2" else lzma.LZMADecompressor))
    return gzip.open(path) if packed else path.open("rb")


class _Streams(io.RawIOBase):
    """The bytes of a file of one or more packed streams. What follows a stream and is none, as of a damaged copy, is an
    error, where the modules bz2 and lzma of Python leave it out."""

    def __init__(self, path: Path, begin: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file = path.open("rb")
        self._begin = begin
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0") or self._file.read(io.DEFAULT_BUFFER_SIZE).lstrip(b"\0")
                if not packed:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (packed := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            if data := self._stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _json_lines(path: Path, file: _Binary) -> Iterator[PlacedRow]:
    for number, raw in enumerate(file, start=1):
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if raw.strip():
            yield f"{path}, line {number}", _json_object(path, number, raw)


def _json_array(path: Path, data: bytes) -> Iterator[PlacedRow]:
    try:
        items: list[object] = json.loads(data, object_pairs_hook=read_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON array: {explain_json(error, data)}") from None
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            item = DataError(f"{path}, item {number}: {_NO_OBJECT}, found {_json_kind(item)}")
        yield f"{path}, item {number}", item


def _csv(path: Path, file: _Binary, delimiter: str) -> Iterator[PlacedRow]:
    csv.field_size_limit(_LONGEST_FIELD)
    header: list[str] = []
    lines = csv.reader(_decode_lines(path, file), delimiter=delimiter, strict=True)
    start = 1
    try:
        for line in lines:
            location, start = f"{path}, line {start}", lines.line_num + 1
            if not header:
                header = line
                if repeated := [name for name in header if header.count(name) > 1]:
                    raise DataError(f"{location}: the header names the column {repeated[0]!r} twice")
            elif line:
                count = f"{write_count(len(line), 'field')} where the header names {write_count(len(header), 'column')}"
                fits = len(line) == len(header)
                yield location, dict(zip(header, line, strict=True)) if fits else DataError(f"{location}: {count}")
    except csv.Error as error:
        several = f" to {lines.line_num}" if lines.line_num > start else ""
        quote = ": a quote that opens there is not closed" if "end of data" in str(error) else ""
        raise DataError(f"{path}, line {start}{several} is no CSV: {error}{quote}") from None


def _decode_lines(path: Path, file: _Binary) -> Iterator[str]:
    """Yield the lines of a file with their ends, which may be those of Windows and of old Macs."""
    number = 0
    for part in file:
        for line in part.splitlines(keepends=True):
            number += 1
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}, byte {error.start + 1}: no CSV in UTF-8 ({error.reason}); save the file "
                    "as UTF-8"
                ) from None


def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these names and values. Raises ValueError where one name has two values."""
    entries = dict(pairs)
    for name, value in pairs if len(entries) < len(pairs) else ():
        if _write_exactly(value) != _write_exactly(entries[name]):
            raise ValueError(
                f"one object has the name {name!r} twice, with different values: keep the one that is meant"
            )
    return entries


def _write_exactly(value: Any) -> str:
    """A text in which 1, 1.0 and true differ, and NaN is itself."""
    return json.dumps(value, sort_keys=True)


def _json_object(path: Path, number: int, raw: bytes) -> dict[str, Any] | DataError:
    location = f"{path}, line {number}"
    try:
        line = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return DataError(f"{location}, byte {error.start + 1}: not UTF-8 ({error.reason}); save the file as UTF-8")
    try:
        row = json.loads(line, object_pairs_hook=read_object)
    except json.JSONDecodeError as error:
        if number == 1 and line.strip() in ("[", "{"):
            kind = "array" if line.strip() == "[" else "object"
            raise DataError(f"{location}: a JSON {kind} over many lines; {_ONE_A_LINE}") from None
        near = line[max(0, error.pos - 20) : error.pos + 20].strip()
        what = error.msg.removeprefix("Expecting ")
        expected = f"expected {what}" if what != error.msg else error.msg
        return DataError(
            f"{location}, column {error.pos + 1}: {expected}, near {near!r}; each line must be one whole JSON object"
        )
    except (ValueError, RecursionError) as error:
        return DataError(f"{location} is no JSON that can be read: {explain_json(error, line)}")
    if not isinstance(row, dict):
        hint = f"; {_ONE_A_LINE}" if isinstance(row, list) and number == 1 else ""
        return DataError(f"{location}: {_NO_OBJECT}, found {_json_kind(row)}{hint}")
    return row


_ONE_A_LINE: Final = "write one object a line, or an array of objects into a file with the ending .json"
_NO_OBJECT: Final = 'expected a JSON object such as {"prompt": "…"}'
_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = _BOM + b" \t\r\n"


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _arrow(path: Path) -> Iterator[PlacedRow]:
    import pyarrow

    number = 0
    try:
        with pyarrow.OSFile(str(path)) as file:
            for batch in _batches(path, file):
                batch.validate(full=True)  # Arrow reads memory that is not its own where offsets are broken
                yield from _plain_rows(batch, str(path), number)
                number += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        raise DataError(f"{path} cannot be read as {kind} after row {number}: {error}") from error


def _batches(path: Path, file: Any) -> Iterator[Any]:
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix.lower() == ".parquet":
        yield from pyarrow.parquet.ParquetFile(file).iter_batches()
    elif file.read(6) == b"ARROW1":  # the file format; `datasets` writes the stream format
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        file.seek(0)
        yield from pyarrow.ipc.open_stream(file)


def _plain_rows(table: Any, name: str, before: int) -> Iterator[PlacedRow]:
    """Yield the rows of an Arrow table or batch of the data ``name``, of which ``before`` rows came earlier."""
    readers = {field.name: reader for field in table.schema if (reader := _reader(field.type, field.name in OPEN))}
    for number, row in enumerate(table.to_pylist(), start=before + 1):
        location, column = f"{name}, row {number}", ""
        try:
            for column, reader in readers.items():
                row[column] = reader(row[column])
        except (ValueError, RecursionError) as error:
            yield location, DataError(f"{location}: column {column!r} cannot be read: {explain_json(error, '')}")
        else:
            yield location, row


def _reader(kind: Any, inside: bool) -> Callable[[Any], Any] | None:
    """Return what makes a plain value of what Arrow returns for a type; None where that is plain.

    JSON, which `datasets` keeps as text, becomes the value that was written. A map becomes a mapping. Fields of tools
    and tool calls that are None are left out: Arrow gives each of them the arguments of all others, and a chat template
    would write those, too.

    Args:
        kind: The type.
        inside: Whether the value is in tools or tool calls.
    """
    from pyarrow import types

    if (storage := getattr(kind, "storage_type", None)) is not None:
        if kind.extension_name == "arrow.json":
            return _read_text
        return _reader(storage, inside)
    if types.is_map(kind):
        read_item = _reader(kind.item_type, inside) or _keep
        return lambda pairs: pairs and read_object([(name, read_item(item)) for name, item in pairs])
    if types.is_struct(kind):
        fields = {field.name: _reader(field.type, inside or field.name in OPEN) for field in kind}
        if not (inside or any(fields.values())):
            return None
        reads = {name: reader or _keep for name, reader in fields.items()}

        def read(entries: Any) -> Any:
            kept = () if entries is None else entries.items()
            entries_by_name = {name: reads[name](entry) for name, entry in kept if entry is not None or not inside}
            return None if entries is None else entries_by_name

        return read
    if (element := getattr(kind, "value_type", None)) is not None and not types.is_dictionary(kind):
        read_element = _reader(element, inside)
        return read_element and (lambda values: values and [read_element(value) for value in values])
    return None


def _keep(value: Any) -> Any:
    return value


def _read_text(value: str | None) -> Any:
    """Return what Arrow's JSON text holds. Raises ValueError for an object with two values of one name, and for a
    number of too many digits."""
    try:
        return None if value is None else json.loads(value, object_pairs_hook=read_object)
    except ValueError as error:
        raise ValueError(explain_json(error, value or "")) from None


def split_names(spec: str, options: Mapping[str, Any]) -> list[str]:
    """Return the dataset's splits. Raises DataError if there is no such dataset or it cannot be reached."""
    if (saved := _saved_splits(spec)) is not None:
        return saved
    look_for_hub(spec)
    import datasets

    try:
        return list(datasets.get_dataset_split_names(spec, options.get("name"), revision=options.get("revision")))
    except Exception as error:  # network, hub, cache and format errors, of a dozen types of three libraries
        raise _unreadable(spec, options, error) from error


def _saved_splits(spec: str) -> list[str] | None:
    """Return the splits of a directory that ``save_to_disk`` wrote, "train" for one dataset; None for any other."""
    try:
        return [*json.loads((Path(spec) / "dataset_dict.json").read_bytes())["splits"]]
    except (OSError, ValueError, LookupError, TypeError):
        return (
            ["train"] if os.path.isfile(os.path.join(spec, "state.json")) else None
        )  # False for a name that is too long


def tell_splits(name: str, splits: Iterable[str], train_split: str, eval_split: str) -> None:
    """Tell of the splits of the data ``name`` that are not read where none is called ``eval_split``."""
    others = [split for split in splits if split != train_split]
    if others and eval_split not in others:
        emit(
            Note(
                f"{name} has no split {eval_split!r}, and {', '.join(map(repr, others))} beside {train_split!r} is not "
                "read: data.eval_split names the split to evaluate on"
            )
        )


def dataset_rows(spec: str, split: str, options: Mapping[str, Any]) -> Iterator[PlacedRow]:
    """Yield the rows of one split. Raises DataError if there is no such dataset or split, or it cannot be reached."""
    import datasets

    names = split_names(spec, options)
    if split not in names:
        hint = suggest_nearest(split, names, likeness=0.4)
        raise DataError(
            f"{spec} has no split {split!r} but {', '.join(names)}{hint}; set data.train_split and data.eval_split"
        )
    try:
        loaded: Any
        if _saved_splits(spec) is None:
            loaded = datasets.load_dataset(spec, split=split, **options)
        else:
            loaded = datasets.load_from_disk(spec, **options)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    except Exception as error:  # as above
        raise _unreadable(spec, options, error) from error
    tables = loaded.with_format("arrow").iter(_ROWS)  # as it is stored: no image is decoded
    return (
        row for number, table in enumerate(tables) for row in _plain_rows(table, f"{spec} [{split}]", number * _ROWS)
    )


def _suggest_file(spec: str) -> str:
    """The end of a message on what is no dataset, where a data file has nearly its name."""
    folder, name = os.path.split(os.path.expanduser(spec))
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") and os.access(folder or ".", os.R_OK) else []
    near = [other for other in names if other.endswith(_SUFFIXES)]
    return suggest_nearest(name, near, prefix=os.path.join(folder, ""), likeness=0.8)


def _unreadable(spec: str, options: Mapping[str, Any], error: Exception) -> DataError:
    if offline := explain_offline(error):
        return DataError(f"{spec}: neither a file nor a dataset that can be loaded: {offline}{_suggest_file(spec)}")
    causes = [error, *([error.__cause__] if isinstance(error.__cause__, Exception) else [])]  # the first may say little
    reason = ": ".join(read_text(cause).strip().partition("\n")[0] or type(cause).__name__ for cause in causes)
    with_options = f" with data.options = {dict(options)!r}" if options else ""
    return DataError(
        f"{spec}: neither a file nor a dataset that can be loaded{with_options}: {reason}. A file ends in .jsonl, "
        ".json, .csv, .parquet or .arrow; a subset of a hub dataset is named by data.options, as in {name: main}"
        + _suggest_file(spec)
    )
