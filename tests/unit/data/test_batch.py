"""A table of named columns."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from podium.data import Batch, Jagged, TensorRef
from podium.errors import DataError


def make() -> Batch:
    return Batch(
        {"t": Jagged.from_rows([torch.arange(n) for n in (1, 2, 3)]), "d": torch.arange(3.0), "p": ["a", "b", "c"]},
        {"step": 1},
    )


def test_columns_are_read_by_kind_and_errors_name_them() -> None:
    batch = make()
    assert (len(batch), batch.keys(), "d" in batch, "x" in batch) == (3, ("t", "d", "p"), True, False)
    assert batch.dense("d").tolist() == [0, 1, 2]
    assert batch.python("p") == ["a", "b", "c"]
    assert batch.jagged("t").lengths.tolist() == [1, 2, 3]
    for read, wrong in ((batch.dense, "p"), (batch.jagged, "d"), (batch.python, "t")):
        with pytest.raises(DataError, match=f"column '{wrong}' is"):
            read(wrong)
    with pytest.raises(DataError, match=r"no column 'dd' in this batch.*did you mean d"):
        batch.dense("dd")


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (2, 9), (-2, 3), (2, 1), (5, 9)])
def test_slices_follow_python(start: int, stop: int) -> None:
    part = make().slice(start, stop)
    assert part.python("p") == ["a", "b", "c"][start:stop]
    assert part.dense("d").tolist() == [0, 1, 2][start:stop]
    assert len(part.jagged("t")) == len(part)
    assert part.meta == {"step": 1}


def test_take_in_any_order_and_not_beyond() -> None:
    taken = make().take([2, 0, 2])
    assert taken.python("p") == ["c", "a", "c"]
    assert [row.tolist() for row in taken.jagged("t").unbind()] == [[0, 1, 2], [0], [0, 1, 2]]
    assert len(make().take([])) == 0
    for wrong in ([3], [-1], [0, 7]):
        with pytest.raises(DataError, match=r"row index outside 0\.\.2"):
            make().take(wrong)


def test_operations_give_new_batches() -> None:
    batch = make()
    more = batch.with_columns({"e": [1, 2, 3]}, f=torch.ones(3)).with_meta(kl=0.1)
    assert more.keys() == ("t", "d", "p", "e", "f")
    assert more.meta == {"step": 1, "kl": 0.1}
    assert more.select("f", "p").keys() == ("f", "p")
    assert more.drop("t", "e").keys() == ("d", "p", "f")
    with pytest.raises(DataError, match="'nothing'"):
        more.drop("nothing")
    assert batch.keys() == ("t", "d", "p")
    assert batch.meta == {"step": 1}
    assert more.select(["f", "p"]).keys() == ("f", "p")
    merged = batch.merge(Batch({"d": torch.zeros(3), "g": [0, 0, 0]}, {"step": 2}), keep="other")
    assert merged.dense("d").tolist() == [0, 0, 0]
    assert merged.meta == {"step": 2}


OF_TWO: dict[str, tuple[Any, Any]] = {
    "tensors": (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
    "shapes": (torch.zeros(2), torch.zeros(2, 1)),
    "kinds of number": (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
    "rows": (Jagged.from_rows([torch.zeros(1), torch.zeros(2)]), Jagged.from_rows([torch.zeros(2), torch.zeros(1)])),
    "objects": ([{"a": [1]}, None], [{"a": [2]}, None]),
    "arrays among objects": ([np.zeros(2), np.zeros(2)], [np.zeros(2), np.ones(2)]),
    "kinds of column": (torch.zeros(2), [0.0, 0.0]),
}


@pytest.mark.parametrize(("mine", "theirs"), OF_TWO.values(), ids=OF_TWO)
def test_batches_that_differ_are_merged_only_by_a_choice(mine: Any, theirs: Any) -> None:
    first, second = Batch({"x": mine, "a": [1, 2]}, {"step": 1}), Batch({"x": theirs, "b": [3, 4]}, {"step": 1})
    with pytest.raises(DataError, match=r"differ in columns \['x'\]: drop them.*keep='self' or keep='other'"):
        first.merge(second)
    assert first.merge(second, keep="self")["x"] is mine
    assert first.merge(second, keep="other")["x"] is theirs
    assert first.merge(Batch({"x": copy.deepcopy(mine), "b": [3, 4]})).columns == ("x", "a", "b")


def test_metadata_that_differs_is_merged_only_by_a_choice() -> None:
    first, second = Batch({"a": [1]}, {"step": 1, "kl": 0.1}), Batch({"b": [1]}, {"step": 2, "kl": 0.1})
    with pytest.raises(DataError, match=r"differ in metadata \['step'\]"):
        first.merge(second)
    assert first.merge(second, keep="self").meta == {"step": 1, "kl": 0.1}


def test_arrays_of_objects_and_texts_are_python_columns() -> None:
    batch = Batch({"o": np.array([{"a": 1}, None], dtype=object), "t": np.array(["one", "two"])})
    assert batch.python("o") == [{"a": 1}, None]
    assert batch.python("t") == ["one", "two"]


def test_a_batch_made_of_a_dict_does_not_follow_it() -> None:
    columns: dict[str, list[int]] = {"a": [1]}
    meta = {"m": 1}
    batch = Batch(columns, meta)  # pyright: ignore[reportArgumentType] - a dict of lists is a mapping of columns
    columns["b"] = [2]
    meta["m"] = 2
    assert batch.keys() == ("a",)
    assert batch.meta == {"m": 1}


def test_concat_restores_and_refuses_other_columns() -> None:
    batch = make()
    joined = Batch.concat([batch.slice(0, 1), batch.slice(1, 1), batch.slice(1, 3)])
    assert joined.python("p") == batch.python("p")
    assert torch.equal(joined.jagged("t").values, batch.jagged("t").values)
    with pytest.raises(DataError, match=r"part 0 has the column 'd' and part 1 has not"):
        Batch.concat([batch, batch.drop("d")])
    with pytest.raises(DataError, match="zero batches"):
        Batch.concat([])
    with pytest.raises(DataError, match=r"column 'd' is of different kinds: float32\[3\] in part 0, list\[3\]"):
        Batch.concat([batch, batch.with_columns(d=[1, 2, 3])])


def test_columns_of_other_lengths_or_kinds_are_refused() -> None:
    with pytest.raises(DataError, match=r"same number of rows; got \{'a': 1, 'b': 2\}"):
        Batch({"a": [1], "b": torch.zeros(2)})
    with pytest.raises(DataError, match="column 'a' is str"):
        Batch({"a": "abc"})  # pyright: ignore[reportArgumentType] - the point
    for number in (torch.tensor(1.0), np.array(1.0), TensorRef.of(torch.tensor(1.0))):
        with pytest.raises(DataError, match="column 'a': a single number, without dimensions, has no rows"):
            Batch({"a": number})
    with pytest.raises(DataError, match=r"column 'a': can't convert np.ndarray"):
        Batch({"a": np.array(["2026-11-26"], dtype="datetime64[D]")})


def test_arrays_are_dense_columns_over_their_own_memory() -> None:
    array = np.zeros((4, 2), np.float32)
    batch = Batch({"x": array}).with_columns(y=array)
    assert torch.equal(batch.dense("x"), torch.zeros(4, 2))
    array[0] = 1.0
    assert float(batch.dense("y")[0, 0]) == 1.0
    for given in (array[::-1], array[:, ::2], np.frombuffer(b"1234", np.uint8)):
        column = Batch({"x": given}).dense("x")
        assert np.array_equal(column.numpy(), given)
        column += 1  # a copy where the array's own memory cannot be written to


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_jagged_columns(layout: torch.layout) -> None:
    rows = [torch.rand(3, 2), torch.rand(1, 2)]
    column = Batch({"x": torch.nested.nested_tensor(rows, layout=layout)}).jagged("x")
    assert all(torch.equal(got, row) for got, row in zip(column.unbind(), rows, strict=True))
    ragged_elsewhere = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(2, 1)])
    with pytest.raises(DataError, match=r"column 'x': rows of a nested tensor differ in length only; got \[\[2, 3\]"):
        Batch({"x": ragged_elsewhere})


def test_parts_that_do_not_fit_are_named() -> None:
    batch = Batch({"x": torch.ones(2)})
    with pytest.raises(DataError, match=r"column 'x': part 0 has rows of float32\[\] and part 2 has rows of float64"):
        Batch.concat([batch, batch.slice(0, 0), batch.with_columns(x=torch.ones(2).double())])
    empty = batch.slice(0, 0).with_columns(x=torch.ones(0, dtype=torch.float64))
    assert Batch.concat([empty, batch]).dense("x").dtype == torch.float32, "what has no rows has no say"


def test_bytes_count_tensors() -> None:
    assert make().nbytes == (6 * 8 + 4 * 8) + 3 * 4
    assert len(Batch({})) == 0


def test_columns_that_share_their_rows_and_columns_that_do_not_are_taken_alike() -> None:
    """What columns have in common is computed once: the lengths of rows, and where a reference's rows lie."""
    rows = [torch.arange(length) + 10 * length for length in (3, 0, 2, 4, 1)]
    others = [torch.arange(length) + 100.5 for length in (1, 2, 0, 1, 2)]
    whole = Jagged.from_rows(rows)
    joined = Jagged.concat(
        [Jagged.from_rows(part).like(TensorRef.of(torch.cat(part))) for part in (rows[:2], rows[2:])]
    )
    alone = Jagged.from_rows(others)
    batch = Batch(
        {
            "whole": whole,
            "twice": whole.like(whole.values * 2),
            "one run": whole.like(TensorRef.of(whole.values)),
            "two runs": joined,
            "two runs too": joined.like(TensorRef.concat([joined.data, joined.data]).slice(0, 10)),
            "others": alone,
            "others elsewhere": alone.like(TensorRef.of(alone.values)),
        }
    )
    index = [4, 0, 0, 3, 1]
    taken = batch.take(index).fetch()
    for name in batch:
        expected = [batch.jagged(name).fetch().row(at).tolist() for at in index]
        assert [row.tolist() for row in taken.jagged(name).unbind()] == expected, name


def test_all_rows_of_what_never_changes_are_the_thing_itself() -> None:
    """A call to one rank, and a weight that is sent in one piece, cut nothing."""
    jagged = Jagged.from_rows([torch.arange(2), torch.arange(3)])
    ref = TensorRef.of(torch.arange(4))
    assert jagged.slice(0, 2) is jagged
    assert jagged.slice(0, 9) is jagged
    assert jagged.slice(1, 2) is not jagged
    assert ref[0:4] is ref
    assert ref[0:3] is not ref
    batch = Batch({"rows": jagged, "names": ["a", "b"]}, {"step": 1})
    whole = batch.slice(0, 2)
    whole.python("names").append("c")
    whole.meta["step"] = 2
    assert batch.python("names") == ["a", "b"]
    assert batch.meta == {"step": 1}


def test_joined_columns_share_offsets_where_their_parts_do() -> None:
    """They are computed once, and travel once."""
    tokens = [Jagged.from_rows([torch.tensor([1, 2]), torch.tensor([3])]), Jagged.from_rows([torch.tensor([4])])]
    parts = [
        Batch({"tokens": one, "mask": one.like(one.values > 1), "text": Jagged.from_rows([*one.unbind()])})
        for one in tokens
    ]
    joined = Batch.concat(parts)
    assert joined.jagged("mask").offsets is joined.jagged("tokens").offsets
    assert joined.jagged("text").offsets is not joined.jagged("tokens").offsets
    assert joined.jagged("mask").offsets.tolist() == [0, 2, 3, 4]
    assert joined.jagged("mask").values.tolist() == [False, True, True, True]
    with pytest.raises(DataError, match="rise from 0 to the 2 values"):
        tokens[0].like(torch.tensor([1, 2]))


def test_columns_whose_values_a_batch_cannot_hold_are_refused() -> None:
    """A mask would be dropped without a word, and rows of a sparse tensor cannot be cut."""
    with pytest.raises(DataError, match=r"column 'x': a tensor has no mask; pass column\.filled"):
        Batch({"x": np.ma.masked_array([1, 2], mask=[False, True])})
    with pytest.raises(DataError, match=r"column 'x': rows of a tensor of layout torch\.sparse_coo cannot be cut"):
        Batch({"x": torch.eye(2).to_sparse()})
