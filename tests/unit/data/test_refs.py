"""References: row operations against the same on tensors, and what they say when misused."""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.data import Batch, Jagged, MemoryStore, TensorRef, concat_values, fetch, keep
from podium.errors import DataError


def pair(seed: int) -> tuple[TensorRef, Tensor]:
    """A reference of several parts in some disorder, and the tensor that it stands for."""
    one, other = torch.arange(40.0).view(10, 4) + seed, torch.arange(100.0, 148.0).view(12, 4)
    store = MemoryStore(shared=True)
    kept = keep([one, other], store, "maker")
    picks = [slice(2, 5), slice(0, 10), slice(7, 8)]
    ref = TensorRef.concat([kept[0][picks[0]], kept[1], kept[0][picks[1]], TensorRef.of(other)[picks[2]]])
    return ref, torch.cat([one[picks[0]], other, one[picks[1]], other[picks[2]]])


@pytest.mark.parametrize("seed", range(20))
def test_any_row_operations_give_the_rows_that_tensors_give(seed: int) -> None:
    ref, tensor = pair(seed)
    chance = random.Random(seed)
    for _ in range(12):
        kind = chance.choice(["slice", "take", "repeat", "mask"])
        if kind == "slice":
            start, stop = sorted(chance.choices(range(-2, len(tensor) + 3), k=2))
            ref, tensor = ref.slice(start, stop), tensor[start:stop]
        elif kind == "mask":
            mask = torch.tensor([chance.random() < 0.8 for _ in range(len(tensor))], dtype=torch.bool)
            ref, tensor = ref[mask], tensor[mask]
        elif kind == "repeat":
            ref, tensor = TensorRef.concat([ref, ref.slice(0, 2)]), torch.cat([tensor, tensor[:2]])
        elif len(tensor):
            index = [chance.randrange(len(tensor)) for _ in range(chance.randrange(1, 2 * len(tensor)))]
            ref, tensor = ref.take(index), tensor[index]
        assert ref.shape == tensor.shape
        assert len(ref) == len(tensor)
        assert torch.equal(ref.get(), tensor)
        assert torch.equal(ref.get(readonly=True), tensor)


def test_runs_that_follow_one_another_are_one_and_unused_parts_are_let_go() -> None:
    store = MemoryStore(shared=True)
    ref, other = keep([torch.arange(100), torch.arange(50)], store, "a")
    assert len(TensorRef.concat([ref[:40], ref[40:70], ref[70:]]).runs) == 1
    assert len(ref.take([3, 4, 5, 9]).runs) == 2
    both = TensorRef.concat([ref, other])
    assert len(both.parts) == 2
    assert len(both[:100].parts) == 1
    assert len(both[5:5].parts) == 0
    assert torch.equal(both[98:102].get(), torch.tensor([98, 99, 0, 1]))


def test_a_view_where_it_can_be_one() -> None:
    ref = keep(torch.arange(1000), MemoryStore(shared=True), "a")
    first, second = ref.get(readonly=True), ref[10:].get(readonly=True)
    assert second.data_ptr() == first.data_ptr() + 80
    assert ref.get().data_ptr() != first.data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (2, 3, 4)])
def test_tensors_of_any_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).to(torch.bfloat16)
    for ref in (TensorRef.of(tensor), keep(tensor, MemoryStore(), "a")):
        assert (ref.shape, ref.dtype, ref.nbytes, ref.dim()) == (shape, torch.bfloat16, tensor.nbytes, len(shape))
        assert torch.equal(ref.get(), tensor)
    if not shape:
        with pytest.raises(TypeError, match="no rows"):
            len(TensorRef.of(tensor))


def test_rows_of_a_jagged_by_reference() -> None:
    rows = [torch.arange(at * 3) + at for at in range(9)]
    whole = Jagged.from_rows(rows)
    far = keep(whole, MemoryStore(shared=True), "a")
    assert isinstance(far.data, TensorRef)
    assert far.nbytes == whole.nbytes
    for index in ([8, 0, 3, 3], [], list(range(9))):
        assert torch.equal(far.take(index).fetch().values, whole.take(index).values)
    assert torch.equal(far.slice(2, 7).fetch().values, whole.slice(2, 7).values)
    joined = Jagged.concat([far.slice(0, 3), whole.slice(3, 9)])
    assert isinstance(joined.data, TensorRef)
    assert torch.equal(joined.fetch().values, whole.values)
    with pytest.raises(DataError, match=r"values of this Jagged are not in this process.*fetch\(\)"):
        _ = far.values


def test_misuse_is_named() -> None:
    ref = TensorRef.of(torch.arange(5))
    for index in ([5], [-1]):
        with pytest.raises(DataError, match=r"row index outside 0\.\.4"):
            ref.take(index)
    with pytest.raises(DataError, match="cannot join zero"):
        TensorRef.concat([])
    with pytest.raises(DataError, match="rows of one dtype and shape"):
        TensorRef.concat([ref, TensorRef.of(torch.ones(5))])
    with pytest.raises(DataError, match="by rows"):
        ref[::2]
    with pytest.raises(DataError, match=r"\.sum of a reference: its 40 bytes are not in this process"):
        ref.sum()
    with pytest.raises(AttributeError, match="no 'summ'"):
        ref.summ()
    with pytest.raises(TypeError, match=r"not saved; save the tensor of \.get\(\)"):
        pickle.dumps(ref)
    with pytest.raises(DataError, match=r"column 'x' is TensorRef.*fetch\('x'\)"):
        Batch({"x": ref}).dense("x")


CALCULATIONS: list[Callable[[Any], Any]] = [
    *(operator.neg, bool, float, int, torch.exp, lambda x: torch.cat([x, x]), lambda x: torch.ones(5) * x),
    *(lambda x: x + 1, lambda x: 1 - x, lambda x: x > 0, lambda x: torch.ones(5) == x, lambda x: x @ x),
    *(lambda x: operator.setitem(x, 0, 1.0), lambda x: operator.iadd(x, 1)),
]


@pytest.mark.parametrize("calculate", CALCULATIONS)
def test_calculating_with_a_reference_says_what_to_do(calculate: Callable[[Any], Any]) -> None:
    with pytest.raises(DataError, match=r"of a reference.* not in this process.*\.get\(\)"):
        calculate(TensorRef.of(torch.ones(5)))


@pytest.mark.parametrize("make", [lambda x: x, TensorRef.of, lambda x: Jagged.from_lengths(x, torch.ones(5).long())])
def test_a_mask_is_not_mistaken_for_row_numbers(make: Callable[[Tensor], Any]) -> None:
    batch = Batch({"x": make(torch.arange(5))})
    wrong: tuple[Any, ...] = (torch.tensor([True] * 5), [True] * 5, [0.0], [[0, 1]], torch.ones(2))
    for index in wrong:
        with pytest.raises(DataError, match=r"rows are taken by their numbers, int64 \[K\]"):
            batch.take(index)
    assert len(batch.take([])) == 0


def test_masks_as_long_as_the_rows_choose_them() -> None:
    ref = TensorRef.of(torch.arange(3))
    assert torch.equal(ref[[True, False, True]].get(), torch.tensor([0, 2]))
    with pytest.raises(DataError, match=r"not by bool\[2\]"):
        ref[torch.tensor([True, False])]


def test_a_copy_of_a_reference_is_the_reference() -> None:
    ref = TensorRef.of(torch.arange(3))
    assert copy.copy(ref) is ref
    assert copy.deepcopy({"a": [ref]})["a"][0] is ref


def test_parts_without_rows_have_no_say_when_references_are_joined() -> None:
    full = Jagged.from_rows([torch.ones(2, 3)])
    parts = keep([Jagged.from_rows([]), full, Jagged.from_rows([])], MemoryStore(shared=True), "maker")
    assert torch.equal(Jagged.concat(parts).fetch().values, full.values)
    assert TensorRef.concat([TensorRef.of(torch.ones(0, 2))] * 2).shape == (0, 2)


def test_keep_leaves_kinds_of_dict_and_tuple_as_they_are() -> None:
    value = {"state": torch.nn.Linear(3, 3).state_dict(), "size": torch.Size([2]), "most": torch.ones(2, 2).max(0)}
    kept = keep(value, MemoryStore(shared=True), "maker")
    assert {name: type(entry) for name, entry in kept.items()} == {name: type(v) for name, v in value.items()}
    assert type(kept["state"]["weight"]) is TensorRef
    assert type(kept["most"].values) is TensorRef
    assert kept["size"] == value["size"]


def test_keep_looks_into_the_usual_structures_and_keeps_a_tensor_once() -> None:
    store = MemoryStore(shared=True)
    shared, other = torch.arange(1000), object()
    batch = Batch({"x": torch.ones(2, 2), "p": [torch.ones(1), "text"]}, {"m": torch.ones(1)})
    value = {"a": shared, "b": [shared, (batch, other)], "sparse": torch.eye(2).to_sparse(), "n": 1}
    kept = keep(value, store, "a")
    assert type(kept["a"]) is TensorRef
    assert kept["a"] is kept["b"][0]
    assert type(kept["b"][1][0]["x"]) is TensorRef
    assert kept["b"][1][0].python("p") == batch.python("p"), "Python columns stay"
    assert kept["b"][1][1] is other
    assert kept["sparse"] is value["sparse"]
    assert 8000 < store.usage().nbytes < 8200
    back = fetch(kept)
    assert torch.equal(back["b"][0], shared)
    assert torch.equal(back["b"][1][0].dense("x"), torch.ones(2, 2))
    assert keep({"n": 1}, store, "a") == {"n": 1}
    again = keep(kept["a"], store, "b")
    assert again is kept["a"], "what is a reference stays it"


def test_joining_tensors_and_references() -> None:
    ref, tensor = TensorRef.of(torch.arange(3)), torch.arange(3, 5)
    joined = concat_values([ref, tensor, ref])
    assert isinstance(joined, TensorRef)
    assert torch.equal(joined.get(), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]))
    assert torch.equal(TensorRef.concat([tensor, ref]).get(), torch.tensor([3, 4, 0, 1, 2]))
    assert isinstance(concat_values([tensor, tensor]), Tensor)


def test_a_batch_fetches_what_is_asked_for() -> None:
    far = keep(Batch({"x": torch.ones(2), "y": torch.zeros(2), "p": [1, 2]}), MemoryStore(shared=True), "a")
    near = far.prefetch().fetch("x")
    assert isinstance(near["x"], Tensor)
    assert isinstance(near["y"], TensorRef)
    assert isinstance(far.to("cpu")["y"], Tensor)
    assert far.nbytes == 16
    with pytest.raises(DataError, match="no column 'z'"):
        far.fetch("z")
