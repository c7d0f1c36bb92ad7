"""Where roles stand: accelerators that are shared, the line that says so, and bfloat16 on a processor without it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium import Worker, devices
from podium.errors import ConfigError, PlacementError, WorkerStartError
from podium.runtime import Node, backend_class
from podium.runtime.pool import Inventory, ResourcePool
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig, InferenceConfig, PlacementConfig, PPOTrainer, build_config
from podium.trainer.checks.placement import bfloat16_keys, check_placement, describe_placement, reserve_places, sharing
from podium.trainer.roles import start_roles
from podium_inference.roles import start_generator
from tests.integration.training import MODEL, tiny
from tests.unit.runtime.test_pool import Machines


def machines(*gpus: int) -> list[Node]:
    return [Node(f"node-{at}", {"cpu": 4.0, "gpu": float(count)}) for at, count in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus", "processes", "loads"),
    [
        ((1,), 2, ((2,),)),
        ((8,), 9, ((2, 1, 1, 1, 1, 1, 1, 1),)),
        ((2, 0, 1), 5, ((2, 2), (1,))),
        ((2, 2), 49, ((13, 12), (12, 12))),
        ((2,), 2, None),
        ((0,), 3, None),
        ((), 3, None),
    ],
)
def test_accelerators_are_shared_evenly_where_they_are_too_few(gpus: Any, processes: int, loads: Any) -> None:
    shares = sharing(machines(*gpus), processes)
    assert (shares and shares.loads) == loads
    if shares is None:
        return
    pool = Inventory(Machines(*machines(*gpus))).reserve(shares.slots, [{"gpu": gpu} for gpu in shares.gpus])
    slots = [(slot.node, slot.devices) for slot in shares.interleave(pool.slots)]
    assert len({*slots}) == sum(gpus), "every accelerator has work"
    for first in range(processes - sum(gpus) + 1):
        assert len({*slots[first : first + sum(gpus)]}) == sum(gpus), "ranks of one role are apart"


def test_worker_processes_are_given_the_accelerator_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees(worker: Worker) -> tuple[tuple[int, ...], str]:  # by value: this module would import torch there
        return worker.ctx.devices, os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    cases: tuple[tuple[str, dict[str, Any], object], ...] = (
        ("local", {"preload": ()}, [((0,), "4"), ((0,), "6"), ((0,), "4"), ((0,), "6"), ((0,), "4")]),
        ("inline", {"nodes": 2}, [((0,), "4,6"), ((1,), "4,6")] * 2 + [((0,), "4,6")]),
    )
    for backend, options, seen in cases:
        with podium.connect(backend, **options) as cluster:
            with reserve_places(cluster, 5, PlacementConfig()) as pool:
                worker = cluster.start(Worker.bind(), pool, distributed=False)
                assert worker.group.run(sees) == seen
                worker.group.close()
            with reserve_places(cluster, 2, PlacementConfig(cpus=1)) as pool:
                assert [dict(slot.resources) for slot in pool] == [{"cpu": 1, "gpu": 1}] * 2
                with (
                    pytest.raises(PlacementError, match=r"placement\.ranks.*0 gpu free"),
                    reserve_places(cluster, 3, PlacementConfig()),
                ):
                    pass


def test_a_worker_that_was_promised_an_accelerator_and_finds_none_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no run computes on the CPU in its place. The line that says where its roles stand comes first."""
    if devices._accelerator() is not None:
        pytest.skip("there is one to find")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said: list[str] = []
    unsubscribe = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    split = tiny(GRPOConfig, tmp_path, placement={"layout": "split"})
    try:
        with pytest.raises(WorkerStartError, match=r"owns device 0.*hide the"):
            PPOTrainer(split, cluster="inline", show=False).fit()
    finally:
        unsubscribe()
    line = "placement  policy, estimator: 1 process on gpu 0 (shared by 2); generator: 1 process on gpu 0 (shared by 2)"
    assert line in said
    with podium.connect("inline") as cluster, pytest.raises(WorkerStartError, match="owns device 0"):
        start_generator(cluster, build_config(InferenceConfig, {"model": MODEL})).__enter__()


@pytest.mark.parametrize(
    ("ports", "ranks"), [("8900", 2), (0, 2), ("8900-8901", 2), ("8900-8901", 3), ("8900-8999", 4)]
)
def test_each_rollout_worker_of_a_machine_has_a_port_or_nothing_starts(ports: Any, ranks: int, tmp_path: Path) -> None:
    environment = {"name": "tests.integration.worlds:one_turn", "options": {"ports": ports}}
    config = tiny(GRPOConfig, tmp_path, environment=environment, placement={"ranks": ranks})
    nodes = [Node("here", {"cpu": 8.0})]
    too_few = ports == "8900" or (ports, ranks) == ("8900-8901", 3)
    with pytest.raises(ConfigError, match=f"such as 8900-{8899 + ranks}") if too_few else nullcontext():
        check_placement(config, "local", backend_class("local").capabilities, nodes)


def test_a_run_with_too_few_ports_starts_nothing(tmp_path: Path) -> None:
    environment = {"name": "tests.integration.worlds:one_turn", "options": {"ports": 8900}}
    config = tiny(GRPOConfig, tmp_path, environment=environment, placement={"ranks": 2})
    refused = pytest.raises(ConfigError, match="2 rollout workers on one machine need a port each")
    with podium.connect("local") as cluster, refused, start_roles(cluster, config):
        pass


def test_the_line_names_devices_and_nodes() -> None:
    nodes = [*machines(4, 2), Node("cores", {"cpu": 4.0})]
    inventory = Inventory(Machines(*nodes))
    apart = inventory.reserve([4, 2], {"gpu": 1})
    cores = inventory.reserve([2], {"cpu": 1}, labels={})
    assert describe_placement([(("policy", "estimator"), apart.slots)]) == (
        "placement  policy, estimator: 6 processes on node-0 gpu 0-3, node-1 gpu 0-1"
    )
    assert describe_placement([(("policy",), apart[:1].slots), (("generator",), (apart[1], apart[3]))]) == (
        "placement  policy: 1 process on gpu 0; generator: 2 processes on gpu 1, 3"
    )
    assert describe_placement([(("policy",), cores.slots)]) == "placement  policy: 2 processes on cpu"
    mixed = Inventory(Machines(*machines(2))).reserve([3], [{"gpu": 0.5}, {"gpu": 0.5}, {"gpu": 1}])
    assert describe_placement([(("policy",), ResourcePool(mixed.slots).slots)]).endswith(
        "on gpu 0-1 (shared by up to 2)"
    )


def test_the_keys_that_ask_for_bfloat16(tmp_path: Path) -> None:
    def keys(roles: tuple[str, ...] = ("policy", "estimator", "generator"), **sections: Any) -> list[str]:
        return bfloat16_keys(tiny(GRPOConfig, tmp_path, **sections), roles)

    assert keys() == []
    half, exact = {"dtype": "bfloat16"}, {"dtype": "float32"}
    assert keys(model=half) == ["model.dtype"]
    assert keys(("generator",), model=half, engine=exact) == []
    assert keys(("generator",), model=half) == ["model.dtype"]
    assert keys(engine=half, parallel={"precision": "bfloat16"}) == ["parallel.precision", "engine.dtype"]
    assert keys(("generator",), parallel={"precision": "bfloat16"}) == []
    assert keys(("estimator",), model=half, engine=half) == []


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_on_a_processor_without_instructions_for_it_is_one_warning(
    has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags\t: fpu sse2 avx2 {'avx512_bf16' if has else ''}\n")
    values = {"model": MODEL, "placement": {"ranks": 2}}
    for dtype, warned in (("bfloat16", not has), (None, False)):
        config = build_config(InferenceConfig, {**values, "engine": {"dtype": dtype}})
        caplog.clear()
        with podium.connect("inline", nodes=2) as cluster, start_generator(cluster, config):
            pass
        assert len([text for text in caplog.messages if "engine.dtype = bfloat16 on the CPU of" in text]) == warned


@pytest.mark.parametrize(
    ("flags", "dtype", "width", "bfloat16_ms", "told"),
    [
        ("amx_bf16", None, 512, 0.4, True),
        ("amx_bf16", None, 512, 0.95, False),  # it would save little
        ("amx_bf16", "bfloat16", 512, 0.4, False),
        ("amx_bf16", "float32", 512, 0.4, False),  # chosen by the user
        ("amx_bf16", None, 64, 0.4, False),  # products are a small part of a small model's time
        ("avx512_bf16", None, 512, 0.4, False),
    ],
)
def test_what_bfloat16_would_save_is_told_where_there_is_a_unit_for_it(
    flags: str, dtype: str | None, width: int, bfloat16_ms: float, told: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags\t: fpu {flags}\n")
    times = {torch.float32: 1.0, torch.bfloat16: bfloat16_ms}
    monkeypatch.setattr(devices, "time_matmuls", lambda terms, columns, dtype: times[dtype])
    model = {**MODEL, "config": {**MODEL["config"], "hidden_size": width, "intermediate_size": width}}
    config = build_config(InferenceConfig, {"model": model, "engine": {"dtype": dtype}})
    with podium.connect("inline") as cluster, start_generator(cluster, config):
        pass
    told_texts = [text for text in caplog.messages if text.startswith("engine.dtype: bfloat16 would speed up")]
    assert len(told_texts) == told
    assert not told or f"16 rows take {bfloat16_ms:.2f} ms with a layer's matrix in place of 1.00" in told_texts[0]


def test_products_are_timed_in_both_types() -> None:
    assert 0 < devices.time_matmuls(64, 128, torch.float32) < 60_000
    assert 0 < devices.time_matmuls(64, 128, torch.bfloat16) < 60_000


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags : fpu avx2\nbugs : x\n", False),
        ("flags : avx512f avx512_bf16 avx512_fp16\n", True),
        ("flags\t\t: amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16\n", True),
        ("Features : fp asimd\nCPU implementer : 0x41\n", False),
        ("processor : 0\n", True),
        (None, True),
    ],
)
def test_a_processor_says_whether_it_has_bfloat16(
    text: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not say, nobody is warned."""
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert devices.has_bfloat16() is has
