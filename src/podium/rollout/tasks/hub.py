"""Datasets of the hub, and directories in its layout, through the `datasets` library."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from podium.errors import DataError
from podium.rollout.tasks.rows import PlacedRow

__all__ = ["dataset_rows", "split_names"]


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
