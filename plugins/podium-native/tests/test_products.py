"""A row's product has the same bits, however many rows are beside it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from podium_native import products
from podium_native.parameters import Dense
from podium_native.products import ROW_QUANTUM, add_product, multiply

SHAPES = [(64, 192), (576, 960), (1536, 576), (1024, 3072), (4864, 896)]  # of small models, SmolLM2, and Qwen2.5
NUMBERS = [16, 32, 64, 128, 144, 192, 256, 272, 528]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_verdicts", {})


def make_case(shape: tuple[int, int], has_bias: bool = False) -> tuple[Dense, Tensor, Tensor]:
    """A matrix, rows for the most of ``NUMBERS``, and a residual."""
    torch.manual_seed(0)
    terms, columns = shape
    dense = Dense(torch.randn(columns, terms).t(), torch.randn(columns) if has_bias else None)
    return dense, torch.randn(max(NUMBERS), terms), torch.randn(max(NUMBERS), columns)


def check_bits(compute: Callable[[slice], Tensor], numbers: list[int]) -> None:
    sixteen_at_a_time = torch.cat(
        [compute(slice(start, start + ROW_QUANTUM)) for start in range(0, max(numbers), ROW_QUANTUM)]
    )
    for number in numbers:
        assert torch.equal(compute(slice(number)), sixteen_at_a_time[:number]), number


@pytest.mark.each_value
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [*SHAPES[:3], *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in SHAPES[3:])]
)
def test_rows_do_not_depend_on_their_number(shape: tuple[int, int], has_bias: bool) -> None:
    """MKL breaks it on two threads, for three of these shapes, where all rows are computed at once."""
    dense, rows, residual = make_case(shape, has_bias)
    check_bits(lambda part: multiply(rows[part], dense), NUMBERS)
    check_bits(lambda part: add_product(residual[part], rows[part], dense), NUMBERS)


@pytest.mark.parametrize("odd", [{32}, {48, 96}, set(range(32, 1 << 11, 16)), {128, 256}])
def test_numbers_that_sum_in_another_order_are_cut(odd: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers are for which a BLAS takes another kernel, none of them is used."""
    calls: list[int] = []

    def from_the_end(function: Any, operands: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
        *addend, rows, weight_t = operands
        calls.append(len(rows))
        if len(rows) in odd:
            rows, weight_t = rows.flip(1), weight_t.flip(0)
        result = function(*addend, rows, weight_t)
        return result if out is None else out.copy_(result)

    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda *operands, out=None: from_the_end(mm, operands, out))
    monkeypatch.setattr(torch, "addmm", lambda *operands, out=None: from_the_end(addmm, operands, out))
    dense, rows, residual = make_case((96, 80))
    check_bits(lambda part: multiply(rows[part], dense), NUMBERS)
    check_bits(lambda part: add_product(residual[part], rows[part], dense), NUMBERS)
    calls.clear()
    for number in NUMBERS:
        multiply(rows[:number], dense)
    assert odd.isdisjoint(calls)  # what was tried is remembered, and not tried again
    assert sum(calls) == sum(NUMBERS)


def test_weights_that_are_no_numbers_leave_no_verdict() -> None:
    dense, rows, _ = make_case((96, 80))
    broken = Dense(torch.full_like(dense.weight_t, torch.nan), None)
    assert multiply(rows[:64], broken).isnan().all()
    assert products._verdicts == {}
    check_bits(lambda part: multiply(rows[part], dense), NUMBERS)


def test_other_numbers_of_rows_are_computed_at_once() -> None:
    dense, rows, _ = make_case((96, 80))
    for number in (1, 7, 17, 100):
        assert torch.equal(multiply(rows[:number], dense), torch.mm(rows[:number], dense.weight_t))
