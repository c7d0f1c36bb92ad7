"""Row operations on everything that can be split and joined: Rows, tensors, arrays, lists, and dicts of them.

The kind of a value follows from its type. It is found by the type's name, so that neither torch nor numpy is imported
for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Number
from typing import Any

from podium.data import Rows, fields
from podium.data.rows import alike
from podium.errors import DataError

JoinScalars = Callable[[Sequence[Any], Sequence[str]], Any]
NO_ROWS = "which has no rows; a Batch, a Jagged, a tensor, an array, a list and a dict of them have rows"

_KINDS = {
    "builtins.list": "list",
    "numpy.ndarray": "array",
    "torch.Tensor": "tensor",
    "podium.data.refs.TensorRef": "tensor",  # the two are joined with one another
}


@lru_cache(maxsize=256)
def kind_of(cls: type) -> str:
    """The kind of a type: list, array, tensor (a reference too), dict (any mapping), rows, or "" if it has no rows."""
    if issubclass(cls, Mapping):
        return "dict"
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), "rows" if issubclass(cls, Rows) else "")


def is_scalar(value: Any) -> bool:
    """Whether an entry of a dict is a single value, which every part of the dict has: a number, a text, bytes, None, a
    tensor or array without dimensions, or a dict of these."""
    if kind_of(value.__class__) == "dict":
        return all(map(is_scalar, value.values()))
    if isinstance(value, Number | str | bytes | None):
        return True
    return not getattr(value, "is_nested", False) and getattr(value, "shape", None) == ()


def open_rows(value: Any, where: str) -> Any:
    """``value`` in the form in which its rows are cut: itself, but a Jagged for a nested tensor.

    Raises:
        DataError: It has no rows, or a dict's entries have unequal numbers of them. The message begins with ``where``.
    """
    kind = kind_of(value.__class__)
    if kind == "dict":
        entries = {
            key: entry if is_scalar(entry) else open_rows(entry, f"{where}[{key!r}]") for key, entry in value.items()
        }
        counts = {key: count_rows(entry) for key, entry in entries.items() if not is_scalar(entry)}
        if not counts:
            raise DataError(f"{where} has no entry with rows: {[*entries] or 'it is empty'}")
        if len(set(counts.values())) > 1:
            raise DataError(f"{where} has entries with unequal numbers of rows: {counts}")
        return entries
    if not kind:
        hint = "; pass its result, by call.arg()" if type(value).__name__ == "Call" else ""
        raise DataError(f"{where} is {type(value).__name__}, {NO_ROWS}{hint}")
    if kind == "tensor" and value.is_nested:  # before its shape, which torch cannot tell of one layout
        return _read_jagged(value)
    if kind in ("tensor", "array") and not value.shape:
        number = "a tensor" if kind == "tensor" else "an array"
        raise DataError(f"{where} is a single number, {number} without dimensions, which has no rows")
    layout = str(getattr(value, "layout", "torch.strided"))
    if kind == "tensor" and layout != "torch.strided":
        raise DataError(f"{where} is a tensor of layout {layout}, whose rows cannot be cut; pass tensor.to_dense()")
    return value


def _read_jagged(nested: Any) -> Any:
    from podium.data import Jagged

    return Jagged.from_nested(nested)


def count_rows(value: Any) -> int:
    """Number of rows of an opened value."""
    if kind_of(value.__class__) != "dict":
        return len(value)
    return count_rows(next(entry for entry in value.values() if not is_scalar(entry)))


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Rows ``start:stop`` of an opened value. Tensors and arrays are views, and no byte of a reference is touched."""
    kind = kind_of(value.__class__)
    if kind == "dict":
        return {key: entry if is_scalar(entry) else slice_rows(entry, start, stop) for key, entry in value.items()}
    return value.slice(start, stop) if kind == "rows" else value[start:stop]


def take_rows(value: Any, index: Sequence[int]) -> Any:
    """Rows of an opened value in the order of ``index``."""
    match kind_of(value.__class__):
        case "dict":
            return {key: entry if is_scalar(entry) else take_rows(entry, index) for key, entry in value.items()}
        case "list":
            return [value[row] for row in index]
        case "rows":
            return value.take(index)
        case _:
            return value[list(index)]


def concat_rows(parts: Sequence[Any], names: Sequence[str], join_scalars: JoinScalars) -> Any:
    """Join values of one kind row-wise.

    Args:
        names: What errors call each part, such as "the result of rank 2".
        join_scalars: Joins the single values that stand beside rows in dicts. It gets one of each part, and names.

    Raises:
        DataError: The parts have no rows, or differ in their kinds, entries, columns, dtypes or shapes of rows.
    """
    first = parts[0]
    kind = kind_of(first.__class__)
    for part, name in zip(parts, names, strict=True):
        if kind_of(part.__class__) != kind or (kind == "rows" and type(part) is not type(first)):
            raise DataError(f"{names[0]} is {type(first).__name__} and {name} is {type(part).__name__}")
        if kind == "dict" and (odd := part.keys() ^ first.keys()):
            raise DataError(f"{names[0]} and {name} differ in their entries: only one of them has {[*odd]}")
    match kind:
        case "":
            raise DataError(f"{names[0]} is {type(first).__name__}, {NO_ROWS}")
        case "dict":
            return {
                key: _concat_entries(
                    [part[key] for part in parts], [f"{name}[{key!r}]" for name in names], join_scalars
                )
                for key in first
            }
        case "list":
            return [row for part in parts for row in part]
        case "array":
            return _concat_arrays(parts, names)
        case "tensor" if not first.is_nested:
            from podium.data import concat_values

            return concat_values(parts, names)
        case "tensor":
            parts = [_read_jagged(part) for part in parts]
        case _:
            pass
    return parts[0] if len(parts) == 1 else parts[0].concat(parts, names)


def _concat_entries(entries: Sequence[Any], names: Sequence[str], join_scalars: JoinScalars) -> Any:
    alone = all(is_scalar(entry) and kind_of(entry.__class__) != "dict" for entry in entries)
    return join_scalars(entries, names) if alone else concat_rows(entries, names, join_scalars)


def _concat_arrays(parts: Sequence[Any], names: Sequence[str]) -> Any:
    import numpy as np

    if all(part.dtype.kind == "U" for part in parts):  # texts: their dtypes differ by the longest one
        parts = [part.astype(np.result_type(*parts)) for part in parts]
    is_masked = any(isinstance(part, np.ma.MaskedArray) for part in parts)
    library: Any = np.ma if is_masked else np  # numpy's own concatenate drops masks
    return library.concatenate(alike(parts, names))


def token_lengths(value: Any) -> list[int] | None:
    """Tokens of each row of an opened value: the lengths of the column ``tokens``, or of the first jagged column.

    None if there is no jagged column.
    """
    kind = kind_of(value.__class__)
    if kind == "dict":
        entries = sorted(value.items(), key=lambda entry: entry[0] != fields.TOKENS)
        return next((lengths for _, entry in entries if (lengths := token_lengths(entry)) is not None), None)
    return value.token_lengths() if kind == "rows" else None


def row_groups(value: Any) -> list[int] | None:
    """The group of each row of an opened value; None if the rows have none, or not in this process."""
    return value.row_groups() if kind_of(value.__class__) == "rows" else None
