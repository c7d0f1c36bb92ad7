"""Data that a script passes as an object, written to files, from which a run and its resumes read them.

Dataset ─▶ Parquet                   RUN_DIR/data/DIGEST.parquet
other rows ─▶ JSON Lines             RUN_DIR/data/DIGEST.jsonl
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig
from podium.rollout.tasks.rows import tell_splits
from podium.runs.config import PPOConfig, SFTConfig
from podium.spelling import write_count
from podium.telemetry import Note, Waiting, emit

C = TypeVar("C", bound=PPOConfig | SFTConfig)

_ROWS: Final = 1000  # that are written together
_FOLDER: Final = ".data"
_TIMES: Final = (datetime.date, datetime.time)


def write_data(data: Any, config: C) -> C:
    """Write ``data`` to files below ``config.run.dir``, and return the configuration that names them.

    Args:
        data: A ``datasets.Dataset``, an ``IterableDataset`` or any other iterable of rows, which are mappings; or
            several, by the names of splits, such as a ``DatasetDict``. Of an iterable without a length, as many rows
            are read as ``data.train_items`` needs, if that is set.
        config: The configuration of the run. Splits are ``data.train_split`` and, if it is there, ``data.eval_split``.

    Raises:
        ConfigError: ``data.train`` is set too, or ``data`` is none of these.
        DataError: There is no such split, or a row holds what JSON cannot hold.
    """
    settings: DataConfig = config.data
    if settings.train:
        raise ConfigError(f"data.train = {settings.train!r}, and the script passes data: give one of the two")
    folder = Path(config.run.dir) / _FOLDER
    if not isinstance(data, Mapping):
        return replace(config, data=replace(settings, train=_write(data, folder, settings, shared=not settings.eval)))
    splits = cast("Mapping[str, Any]", data)
    if settings.train_split not in splits:
        raise DataError(
            f"data has no split {settings.train_split!r} but {', '.join(map(str, splits))}; set data.train_split. "
            "Lists by the names of columns become rows by datasets.Dataset.from_dict(data)"
        )
    held_out = "" if settings.eval else splits.get(settings.eval_split, "")
    if not settings.eval:
        tell_splits("data", splits, settings.train_split, settings.eval_split)
    train = _write(splits[settings.train_split], folder, settings, shared=not (settings.eval or held_out != ""))
    evaluation = settings.eval if held_out == "" else _write(held_out, folder, None, shared=False)
    return replace(config, data=replace(settings, train=train, eval=evaluation))


def _write(rows: Any, folder: Path, settings: DataConfig | None, *, shared: bool) -> str:
    """Write rows to a file whose name is their digest, and return its path.

    Args:
        settings: Those of training rows; None for held-out rows, of which all are written.
        shared: Whether a share of the rows is held out.
    """
    import datasets

    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable) or hasattr(rows, "iterrows"):
        raise ConfigError(
            f"data is a {type(rows).__name__}; expected a Dataset, an iterable of rows, or these by split. Files and "
            "datasets of the hub are named by data.train, and the rows of a DataFrame are frame.to_dict('records')"
        )
    most = None
    if settings is not None and settings.train_items is not None and not hasattr(rows, "__len__"):
        most = math.ceil(settings.train_items / (1 - settings.holdout * shared))
    aside = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":  # which is a function of the script
            _write_table(rows, aside)
            suffix = ".parquet"
        else:
            _write_lines(islice(cast("Iterable[Any]", rows), most), aside)
            suffix = ".jsonl"
        with aside.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        path = folder / f"{digest}{suffix}"
        aside.replace(path)
    except OSError as error:
        raise ConfigError(f"data cannot be written to {folder}: {error.strerror or error}; set run.dir") from error
    finally:
        aside.unlink(missing_ok=True)
    return str(path)


def _write_table(rows: Any, path: Path) -> None:
    import pyarrow.parquet

    if not rows.format["output_all_columns"]:
        rows = rows.select_columns(rows.format["columns"])  # set_format may have hidden others
    with pyarrow.parquet.ParquetWriter(path, rows.features.arrow_schema) as writer:
        for table in rows.with_format("arrow").iter(_ROWS):
            writer.write_table(table)


def _write_lines(rows: Iterable[Any], path: Path) -> None:
    changed = dict[tuple[str, str], str]()  # what a reward gets in place of a value of this type, by column
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            if number % _ROWS == 0:
                emit(Waiting(f"reading data of the script, {write_count(number, 'row')} so far"))
            if not isinstance(row, Mapping):
                raise DataError(f"row {number} of data is a {type(row).__name__}; expected a mapping of columns")
            columns = cast("Mapping[str, Any]", row)
            line: dict[str, str] = {}
            for name, value in columns.items():
                if str(name) in line:
                    raise DataError(f"row {number} of data has two columns that are called {str(name)!r}; rename one")
                try:
                    changed.update({(str(name), kind): form for kind, form in _list_changed(value)})
                    line[str(name)] = json.dumps(value, default=_plain)
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(f"row {number} of data, column {name!r}: {error}; expected plain values") from None
            file.write("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in line.items()) + "}\n")
    for (name, kind), form in changed.items():
        emit(Note(f"the column {name!r} of data holds a {kind}, which is read as a {form}, and so a reward gets it"))


def _list_changed(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the types in a value that JSON has not, and what a reward gets in their place.

    Raises TypeError for a mapping whose keys are no texts: JSON would make them texts, so that a reward no longer finds
    them.
    """
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping has the key {key!r} of type {type(key).__name__}: give texts as keys")
            yield from _list_changed(item)
    elif isinstance(value, list | tuple):
        if isinstance(value, tuple):
            yield type(value).__name__, "list"
        for item in cast("list[Any]", value):
            yield from _list_changed(item)
    elif isinstance(value, _TIMES) and type(value).__name__ != "NaTType":
        yield type(value).__name__, "text"


def _plain(value: Any) -> Any:
    """Return an array or a scalar of NumPy or torch as plain values, a time as text, a mapping as a dictionary."""
    if type(value).__name__ in ("NAType", "NaTType"):  # as pandas marks what is missing
        return None
    if isinstance(value, _TIMES):
        return str(value)
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if callable(read := getattr(value, "tolist", None)):
        for _ in _list_changed(plain := read()):  # it checks the keys
            pass
        return plain
    raise TypeError(f"a {type(value).__name__} is no value that JSON can hold")
