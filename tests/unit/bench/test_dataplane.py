"""The suites of the data plane measure what they say: the bytes arrive, and rows compare the right samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import podium
from bench import ways
from bench.context import Context
from bench.holder import Adder, make_columns
from bench.peers.touching import first_element, timed_look, touch_pages
from bench.suites import dataplane
from bench.workload import SHAPES
from podium import Batch, TensorRef
from podium.models import ModelConfig
from podium.workers import Generator, Policy, StreamedSync


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(quick=True, logs=tmp_path, say=lambda text: None)


@pytest.mark.parametrize("numpy", [False, True])
def test_a_look_reads_one_element_or_a_byte_of_every_page(numpy: bool) -> None:
    tensor = torch.zeros(3000)  # three pages
    tensor.view(torch.uint8)[::4096] = 7
    data = tensor.numpy() if numpy else tensor
    assert touch_pages(data) == 21
    assert first_element(data) == float(tensor[0])
    assert timed_look(lambda: data, pages=True) > 0


def test_a_hop_has_four_figures_and_leaves_nothing_behind() -> None:
    with dataplane.pair("local") as (producer, consumer):
        for readonly in (False, True):
            figures = dataplane.podium_hop(producer, consumer, 1 << 20, readonly=readonly)
            assert set(figures) == set(ways.FIGURES)
            assert min(figures.values()) > 0


def test_rows_of_both_backends_are_compared_with_the_same_samples_of_the_others() -> None:
    def hop_of(seconds: float, put_s: float) -> list[dict[str, float]]:
        return [{"put": put_s, "hop": seconds, "inside": seconds, "touch": seconds}]

    others = {"ray": hop_of(4.0, 0.0)}  # a peer may have the name of a backend
    hops = {"podium_local": hop_of(1.0, 1.0), "podium_ray": hop_of(2.0, 1.0), **others}
    rows = {row.name: row for row in dataplane.hop_rows(16, hops)}
    assert rows["hop_16MiB_local"].ratio == {"ray": 4.0}
    assert rows["hop_touch_16MiB_ray"].ratio == {"ray": 2.0}
    assert rows["hop_put_16MiB_ray"].others == {}, "who has nothing to put is left out"


def test_a_transfer_adds_one_to_every_row_and_stays_with_the_workers() -> None:
    with podium.connect("local", echo=False) as cluster:
        adders = cluster.start(Adder.bind(), cluster.pool([2]))
        assert isinstance(adders.add_one(adders.make(5, 3000))["a"], TensorRef)
        assert dataplane.by_reference_s(adders, 5, 3000) > 0
        assert dataplane.given_s(adders, make_columns(5, 3000), fetch=True) > 0


def test_a_transfer_that_changed_nothing_is_noticed() -> None:
    with pytest.raises(AssertionError, match="came back"):
        dataplane.check_twos(make_columns(5, 3), 5, 3)
    with pytest.raises(AssertionError, match="4 rows"):
        dataplane.check_twos(Batch({"b": torch.full((4, 3), 2)}), 5, 3)


@pytest.mark.exhaustive
def test_a_weight_sync_is_of_whole_models_and_timed_until_generators_have_it() -> None:
    small = {"model_type": "qwen3", **SHAPES["1m"].config()}
    model = ModelConfig(config=small, tokenizer="chars:0123456789")
    with podium.connect("local", echo=False) as cluster:
        policy, generator = cluster.start(Policy.bind(model)), cluster.start(Generator.bind(model))
        sync = StreamedSync(policy, [generator])
        sync.init()
        assert dataplane.sync_s(sync, 0) > 0
        assert generator.weights_version() == [0]


def test_sizes_read_as_people_write_them() -> None:
    assert [ways.size_of(mib << 20) for mib in (1, 512, 2048)] == ["1MiB", "512MiB", "2GiB"]


def test_what_does_not_fit_into_the_memory_is_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    context = Context(quick=True, logs=tmp_path, say=said.append)
    assert ways.room_for(context, "a little", 0)
    assert not said
    assert not ways.room_for(context, "a lot", 1 << 20)
    assert "a lot is left out" in said[0] and "it needs 1048576" in said[0]
