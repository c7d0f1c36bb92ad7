"""A rank of inline has torch's modes to itself, as a process has: neither the script nor another rank changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import podium
from podium import Cluster, Worker, endpoint

USUAL = (True, False, torch.float32, torch.float32)


def look(worker: Any = None) -> tuple[bool, bool, torch.dtype, torch.dtype]:
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(1).dtype, product.dtype


class Inference(Worker):
    """Changes every mode, as a worker does that never trains."""

    def __init__(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)

    @endpoint
    def look(self) -> Any:
        return look()

    @endpoint
    def ask(self, other: Any) -> Any:
        return other.look()[0], look()

    @endpoint
    def fail(self) -> None:
        torch.set_default_dtype(torch.float64)
        raise ValueError("on the way")


class Trains(Worker):
    @endpoint
    def look(self) -> Any:
        return look()

    @endpoint
    def train(self, values: torch.Tensor) -> float:
        weight = torch.ones(2, requires_grad=True)
        (weight * values).sum().backward()
        assert weight.grad is not None
        return float(weight.grad.sum())


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline") as cluster:
        yield cluster


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_a_scripts_modes_are_not_those_of_its_workers(cluster: Cluster, mode: Any) -> None:
    handle = cluster.start(Trains.bind(), cluster.pool(2))
    context: AbstractContextManager[Any] = mode()
    with context:
        before = look()
        assert handle.look() == [USUAL] * 2
        assert handle.train(torch.ones(2)) == [2.0] * 2
        assert look() == before, "the script has its own again"


def test_a_workers_modes_are_its_own(cluster: Cluster) -> None:
    inference = cluster.start(Inference.bind(), name="inference")
    trains = cluster.start(Trains.bind(), name="trains")
    low = (False, False, torch.bfloat16, torch.bfloat16)
    assert look() == USUAL
    assert inference.look() == [low], "what the constructor has set stays"
    assert trains.look() == [USUAL]
    assert inference.ask(trains) == [(USUAL, low)]
    with pytest.raises(podium.EndpointError, match="on the way"):
        inference.fail()
    assert look() == USUAL
    assert inference.look() == [(False, False, torch.float64, torch.float64)]
