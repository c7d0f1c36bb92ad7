"""Contract: values survive the way to a worker and back, and nobody else's copy changes."""

import dataclasses
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.errors import EndpointError, SerializationError
from podium.runtime import Handle
from podium_testing.target import refuses, started
from podium_testing.workers import Probe

__all__ = ["ValueContract"]

LARGE = 300_000  # elements: far above what any backend sends within a message


@dataclasses.dataclass(frozen=True)
class Record:
    """A user's own record."""

    name: str
    values: Tensor


class Unpicklable:
    """A value that refuses to travel, and says why."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("holds a socket")


class _NeedsArguments(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} {second}")


class _DoesNotPickle(Unpicklable, Exception):
    pass


class _UnpicklesOnce(Exception):
    """Unpickles in the process (or thread) that made it, and nowhere else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_at_home, (os.getpid(), threading.get_ident(), str(self))


def _only_at_home(pid: int, thread: int, message: str) -> Exception:
    if (pid, thread) != (os.getpid(), threading.get_ident()):
        raise RuntimeError("this class cannot be made here")
    return _UnpicklesOnce(message)


STRANGE: dict[str, Callable[[str], Exception]] = {
    "plain": KeyError,
    "needs arguments": lambda message: _NeedsArguments(message, 2),
    "does not pickle": _DoesNotPickle,
    "does not unpickle here": _UnpicklesOnce,
}


def tensors() -> dict[str, Tensor]:
    """Return tensors of every kind that a user may send, small and large."""
    return {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.arange(LARGE).to(torch.bfloat16),
        "float16": torch.arange(8).to(torch.float16),
        "float8": torch.arange(8.0).to(torch.float8_e4m3fn),
        "int8": torch.arange(-4, 4, dtype=torch.int8),
        "int64": torch.arange(LARGE),
        "complex64": torch.complex(torch.arange(4.0), -torch.arange(4.0)),
        "conjugated": torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
        "negated view": torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag,
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "strided": torch.arange(LARGE)[::2],
        "row slice": torch.arange(float(LARGE)).reshape(-1, 10)[5:7],
        "expanded": torch.ones(1).expand(4, 5),
        "large": torch.arange(float(LARGE)).reshape(-1, 100),
    }


def make_batch(lengths: Sequence[int]) -> Batch:
    """Return a batch with every kind of column. Row i holds only the number i."""
    rows = [torch.full((length,), at) for at, length in enumerate(lengths)]
    return Batch(
        {
            fields.TOKENS: Jagged.from_rows(rows),
            fields.REWARDS: torch.arange(len(lengths), dtype=torch.float32),
            fields.FINISH_REASON: [f"row {at}" for at in range(len(lengths))],
        },
        {"temperature": 0.5},
    )


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of any dtype hold the same."""
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and torch.equal(left.to(torch.complex64), right.to(torch.complex64))


def same_batch(left: Batch, right: Batch) -> bool:
    """Return whether two batches hold the same rows in the same order. Columns that are elsewhere are fetched."""
    left, right = left.fetch(), right.fetch()
    return {*left} == {*right} and all(_same(left[name], right[name]) for name in left)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Jagged):
        return torch.equal(left.values, right.values) and torch.equal(left.offsets, right.offsets)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


class ValueContract:
    echo = started(Probe.bind(), 2, name="echo")

    @pytest.mark.parametrize("name", sorted(tensors()))
    def test_tensors_come_back_equal(self, echo: Handle[Probe], name: str) -> None:
        sent = tensors()[name]
        assert [same_tensor(got, sent) for got in echo.echo(sent)] == [True, True]

    def test_special_tensors_keep_their_nature(self, echo: Handle[Probe]) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        frozen = torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)
        leaf = torch.ones(2, requires_grad=True)
        sparse = torch.eye(3).to_sparse()
        got = echo.echo_once([parameter, frozen, leaf, leaf * 2, sparse, torch.nn.Parameter(torch.empty(0))])
        assert [type(value) for value in got[:3]] == [torch.nn.Parameter, torch.nn.Parameter, Tensor]
        assert [value.requires_grad for value in got[:4]] == [True, False, True, False]
        assert torch.equal(got[4].to_dense(), torch.eye(3))
        assert isinstance(got[5], torch.nn.Parameter)

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_tensors_keep_the_attributes_that_a_framework_has_set(self, echo: Handle[Probe], size: int) -> None:
        parameter, buffer = torch.nn.Parameter(torch.ones(size)), torch.nn.Buffer(torch.ones(size))
        marked: Any = torch.ones(size)
        marked.origin = {"layer": 3, "scale": torch.ones(size), "itself": marked}
        parameter.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue] - as Megatron-LM does
        got = echo.echo_once([parameter, buffer, Batch({"x": marked}).dense("x")])
        assert isinstance(got[1], torch.nn.Buffer)
        assert (got[0].tensor_model_parallel, got[2].origin["layer"]) == (True, 3)
        assert torch.equal(got[2].origin["scale"], torch.ones(size))
        assert got[2].origin["itself"] is got[2]
        marked.origin = threading.Lock()
        refuses(SerializationError, r"'origin' \(lock\)", echo.echo_once, marked)

    def test_a_state_dict_keeps_tied_weights_tied(self, echo: Handle[Probe]) -> None:
        shared = torch.nn.Parameter(torch.ones(LARGE))
        got = echo.echo_once({"a": shared, "b": shared})
        assert got["a"] is got["b"]

    def test_numpy_arrays_come_back_equal_and_as_writable_as_they_were(self, echo: Handle[Probe]) -> None:
        arrays = [np.arange(LARGE), np.ones((2, 3), order="F"), np.empty(0), np.array(["a", None], dtype=object)]
        frozen = np.arange(LARGE)
        frozen.flags.writeable = False
        got = echo.echo_once([*arrays, frozen])
        for sent, back in zip([*arrays, frozen], got, strict=True):
            assert back.dtype == sent.dtype
            assert np.array_equal(back, sent)
        for back in got[:2]:
            back.flat[0] = 7
            assert back.flat[0] == 7
        assert not got[4].flags.writeable

    def test_python_objects_of_any_size(self, echo: Handle[Probe]) -> None:
        large = {at: f"value {at}" for at in range(50_000)}
        text = "é" * LARGE
        values = [large, text, b"\0" * LARGE, {1, 2}, (1, [2, {"x": None}]), 2**100, OrderedDict(a=1), float("inf")]
        assert echo.echo(values) == [values] * 2
        for value in (None, True, "", 0, b"", [], {}, (), *("é" * (1 << size) for size in range(10, 18))):
            assert echo.echo(value) == [value] * 2

    def test_records_batches_and_functions(self, echo: Handle[Probe]) -> None:
        record = Record("r", torch.arange(LARGE))
        got = echo.echo_once(record)
        assert type(got) is Record
        assert torch.equal(got.values, record.values)
        offset = 3
        assert echo.echo_once(lambda x: x + offset)(4) == 7
        batch = Batch({"t": Jagged.from_rows([torch.arange(3), torch.arange(0)]), "p": ["a", None]}, {"k": 1})
        back = echo.echo_once(batch)
        assert (len(back), back.meta, back.python("p")) == (2, {"k": 1}, ["a", None])
        assert [row.tolist() for row in back.jagged("t").unbind()] == [[0, 1, 2], []]

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_workers_that_write_to_what_they_got_harm_nobody(self, echo: Handle[Probe], size: int) -> None:
        value = torch.ones(size)
        for _ in range(2):  # the second time meets memory that was used before
            assert echo.overwrite(value) == [2.0 * size, 3.0 * size]
            assert torch.equal(value, torch.ones(size))

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_results_can_be_written_and_are_separate(self, echo: Handle[Probe], size: int) -> None:
        first, second = echo.echo(torch.zeros(size))
        first += 1
        second += 2
        again = echo.echo(torch.zeros(size))
        assert [float(value[0]) for value in (first, second, *again)] == [1, 2, 0, 0]

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_what_the_caller_changes_after_submitting_is_not_seen(self, echo: Handle[Probe], size: int) -> None:
        value = torch.zeros(size)
        calls = [echo.echo_once.submit(value) for _ in range(3)]
        value += 1
        assert [float(call.result().sum()) for call in calls] == [0, 0, 0]

    def test_results_outlive_the_calls_after_them(self, echo: Handle[Probe]) -> None:
        kept = [echo.echo_once(torch.full((LARGE,), at)) for at in range(8)]
        assert [int(value[-1]) for value in kept] == list(range(8))

    def test_tensors_are_aligned_for_their_type(self, echo: Handle[Probe]) -> None:
        """An odd number of pickle bytes must not shift the numbers behind it."""
        for length in range(8):
            _, value = echo.echo_once(("x" * length, torch.arange(4.0, dtype=torch.float64)))
            assert value.data_ptr() % value.element_size() == 0

    def test_an_argument_that_does_not_pickle_is_named_and_not_sent(self, echo: Handle[Probe]) -> None:
        before = echo.seen()
        for value, position in ((Unpicklable(), "'value'"), ({"deep": [1, Unpicklable()]}, "'deep'")):
            refuses(SerializationError, rf"echo\.echo.*{position}.*holds a socket", echo.echo, value)
        assert echo.seen() == before

    def test_a_result_that_does_not_pickle_is_an_error_of_the_endpoint(self, echo: Handle[Probe]) -> None:
        with pytest.raises(EndpointError, match=r"echo\._make_unpicklable.*the result.*holds a socket") as caught:
            echo.group.run(_make_unpicklable)
        assert caught.value.rank in (0, 1)
        assert echo.rank() == [0, 1]

    def test_what_does_not_pickle_is_named_by_its_path(self, echo: Handle[Probe]) -> None:
        path = r"'deep' \(list\): 1 \(Record\): 'values' \(Unpicklable\): TypeError: holds a socket"
        refuses(SerializationError, rf"echo\.echo.*'value' \(dict\): {path}", echo.echo, _deep(Probe()))
        refuses(EndpointError, rf"echo\._deep.*the result does not pickle: {path}", echo.group.run, _deep)
        columns = Batch({"odd": ["a", Unpicklable()]})
        refuses(SerializationError, r"'odd' \(list\): 1 \(Unpicklable\): TypeError", echo.echo, columns)

    def test_an_argument_that_does_not_unpickle_fails_its_call_alone(self, echo: Handle[Probe]) -> None:
        for _ in range(2):
            with pytest.raises(EndpointError, match=r"(?s)does not unpickle.*not on this side") as caught:
                echo.echo(_Homesick())
            assert isinstance(caught.value.__cause__, SerializationError)
        assert echo.rank() == [0, 1]

    def test_a_result_that_does_not_unpickle_fails_its_call_alone(self, echo: type[Probe]) -> None:
        for _ in range(2):
            refuses(SerializationError, "(?s)does not unpickle.*not on this side", echo.group.run, _homesick)
        assert echo.rank() == [0, 1]

    @pytest.mark.parametrize("kind", STRANGE)
    def test_an_exception_arrives_whatever_its_class_does(self, echo: Handle[Probe], kind: str) -> None:
        with pytest.raises(EndpointError, match=re.escape(kind)) as caught:
            echo.group.run(_raise_strange, kind)
        assert "Traceback" in caught.value.remote_traceback
        assert "_raise_strange" in caught.value.remote_traceback
        if kind == "plain":
            assert isinstance(caught.value.__cause__, KeyError)
        assert echo.rank() == [0, 1]


def _deep(worker: Probe) -> dict[str, Any]:
    return {"deep": [1, Record("r", Unpicklable())]}  # pyright: ignore[reportArgumentType] - the point


def _make_unpicklable(worker: Probe) -> Unpicklable:
    return Unpicklable()


def _raise_strange(worker: Probe, kind: str) -> None:
    raise STRANGE[kind](kind)


class _Homesick:
    """Pickles, and raises wherever it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _homesick(worker: Probe) -> _Homesick:
    return _Homesick()


def _refuse() -> None:
    raise RuntimeError("not on this side")
