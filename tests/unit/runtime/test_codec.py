"""What a value weighs on its way, and what stands in the message when it cannot go."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from podium.data import MemoryStore, TensorRef, keep
from podium.errors import SerializationError
from podium.runtime.codec import decode, encode, read_references


def weight(value: object) -> int:
    """Bytes on the wire."""
    data, buffers = encode(value)
    return len(data) + sum(buffer.raw().nbytes for buffer in buffers)


def travel(value: Any) -> Any:
    data, buffers = encode(value)
    return decode(data, [bytearray(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[3:5],
        lambda x: x[7],
        lambda x: x[:, 0],
        lambda x: x[::100],
        lambda x: x.T[:1],
        lambda x: torch.nn.Parameter(x[:2]),
        lambda x: {"rows": [x[1:2], x[5:6]]},
    ],
    ids=["rows", "row", "column", "strided", "transposed", "parameter", "nested"],
)
def test_a_view_sends_its_own_bytes_and_not_its_storage(view: Any) -> None:
    """torch's own reduction sends the storage: 4 MB here."""
    whole = torch.zeros(1000, 1000)
    assert weight(view(whole)) < 50_000
    assert len(pickle.dumps(whole[3:5])) > 4_000_000, "or this test has lost its point"


def test_tensor_bytes_stay_out_of_the_pickle_and_are_not_copied() -> None:
    whole = torch.arange(100_000.0)
    data, buffers = encode({"x": whole})
    assert len(data) < 500
    whole[0] = 7.0
    assert torch.frombuffer(buffers[0].raw(), dtype=torch.float32)[0] == 7.0


def test_the_same_tensor_goes_once() -> None:
    tensor = torch.ones(1000)
    assert weight([tensor] * 10) < 2 * weight(tensor)
    first, second = travel([tensor, tensor])
    assert first is second


def test_tensors_without_plain_memory_go_torchs_own_way() -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(travel(sparse).to_dense(), torch.eye(4))
    assert travel(torch.empty(2, device="meta")).device.type == "meta"


def test_modules_arrive_whole() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    got = travel(module)
    for name, value in module.state_dict().items():
        assert torch.equal(got.state_dict()[name], value)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in got.parameters())
    got(torch.ones(2, 3)).sum().backward()


def test_what_does_not_pickle_is_found_in_its_nest() -> None:
    with pytest.raises(SerializationError, match=r"the thing does not pickle: 'a' \(list\): 1 \(dict\): 'lock'.*lock"):
        encode({"ok": 1, "a": [0, {"lock": threading.Lock()}]}, "the thing")
    with pytest.raises(SerializationError, match="a value does not pickle: TypeError"):
        encode(threading.Lock())


def test_a_reference_is_not_to_blame_for_another_entry() -> None:
    with pytest.raises(SerializationError, match=r"'lock' \(lock\)"):
        encode({"ref": TensorRef.of(torch.ones(3)), "lock": threading.Lock()})


def test_references_to_the_same_rows_are_tensors_apart() -> None:
    ref = keep(torch.arange(10), _Private(shared=True), "maker")
    blocks: list[Any] = []
    data, buffers = encode([ref[0:5], ref[4:8], ref[8:10], ref[0:5]], blocks=blocks)
    openers = [lambda info, block=block: block for block in blocks]
    got = read_references("tensor", lambda: decode(data, buffers, blocks=openers))
    for tensor in got:
        tensor += 100
    assert [tensor.tolist() for tensor in got] == [
        [*range(100, 105)],
        [*range(104, 108)],
        [108, 109],
        [*range(100, 105)],
    ]


class _Private(MemoryStore):
    """Opened blocks are the reader's own, as mapped ones are."""

    def make(self, buffers: Any, offsets: Any, info: Any) -> Any:
        block: Any = super().make(buffers, offsets, info)
        block.open = lambda: block._memory.copy()
        return block


def test_what_does_not_unpickle_is_named() -> None:
    with pytest.raises(SerializationError, match="the answer does not unpickle: UnpicklingError"):
        decode(b"nonsense", [], "the answer")


def test_recursive_values_survive() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    got = travel(knot)
    assert got[1] is got


def test_a_value_too_deep_to_pickle_is_an_error_like_any_other() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="recursion"):
        encode({"deep": deep})
