"""Which accelerators a process may use, and how a worker process is shown only its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import podium
from podium.backends import process
from podium.errors import PlacementError

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0,2,3", ["0", "2", "3"]),
        ("GPU-1a,GPU-2b", ["GPU-1a", "GPU-2b"]),
        (" 1 , 0 ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_what_this_process_may_use_is_what_its_variable_says(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str, expected: list[str]
) -> None:
    monkeypatch.setenv(variable, given)
    assert process.accelerators() == expected


def test_a_worker_process_sees_its_own_by_the_names_that_this_process_knows() -> None:
    """Index 1 of a script that may use devices 4 and 6 is device 6 of the machine."""
    (shown,) = process.visibility((1,), ["4", "6"]).values()
    assert shown == "6"
    (shown,) = process.visibility((0, 2), ["GPU-a", "GPU-b", "GPU-c"]).values()
    assert shown == "GPU-a,GPU-c"


def test_a_worker_process_without_accelerators_sees_none_where_there_are_some() -> None:
    assert set(process.visibility((), ["0", "1"]).values()) == {""}
    assert process.visibility((), []) == {}


def test_the_variable_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for present, variable in (("/dev/kfd", "HIP_VISIBLE_DEVICES"), ("", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(Path, "exists", lambda path, present=present: str(path) == present)
        monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
        assert process.visibility((0,), ["0"]) == {variable: "0"}
    monkeypatch.setattr(
        Path, "glob", lambda path, pattern: iter([Path("/dev/davinci0")] if "davinci" in pattern else [])
    )
    assert process.visibility((0,), ["0"]) == {"ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert process.accelerators() == ["0"]


def test_inline_has_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of a machine with accelerators runs in a debugger. A worker owns devices of the script's process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    with podium.connect("inline") as cluster:
        pool = cluster.pool([2], gpus=[1, 2], memory=1 << 20)
        workers = cluster.start(podium.Worker.bind(), pool)
        assert workers.group.run(lambda worker: worker.ctx.devices) == [(0,), (1, 2)]
        with pytest.raises(PlacementError, match=r"asked for 1 gpu on 1 node; 0 gpu free.*held by: worker \(3\)"):
            cluster.pool([1], gpus=1)
    with podium.connect("local", nodes=3) as cluster:
        workers = cluster.start(podium.Worker.bind(), cluster.pool([1, 1, 1], gpus=1), distributed=False)
        assert workers.group.run(_visible) == ["4", "6", "7"]


def _visible(worker: podium.Worker) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.ray
def test_fractions_that_fill_two_accelerators_ask_ray_for_two() -> None:
    """Although eighteen ninths are a little more in floating point."""
    from podium_ray.placement import Inventory

    for parts in (9, 10):
        assert Inventory()._rays("node", [{"gpu": 1 / parts}] * 2 * parts) == {"GPU": 2.0}
    assert Inventory()._rays("node", [{"gpu": 0.5}] * 3) == {"GPU": 2.0}


MIXED = (("01:00.0", "NVIDIA A100-SXM4-80GB"), ("41:00.0", "NVIDIA L40S"), ("81:00.0", "NVIDIA A100-SXM4-80GB"))


def write_cards(directory: Path, *cards: tuple[str, str]) -> None:
    """Write what NVIDIA's driver tells of its cards, as of release 550."""
    for bus, model in cards:
        card = directory / f"0000:{bus}"
        card.mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ:   \t\t 123\nGPU UUID: \t GPU-{bus[:2]}aa-bb\nBus Location: \t 0000:{bus}\n"
        (card / "information").write_text(text)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "NVIDIA_CARDS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return tmp_path / "gpus"


def test_kinds_are_known_where_cuda_numbers_no_others(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.accelerator_kinds(["0"]) == ("",), "no driver of NVIDIA"
    write_cards(cards, *MIXED)
    assert process.accelerator_kinds(["0", "1"]) == ("", ""), "CUDA puts the fastest first"
    assert process.accelerator_kinds(["GPU-41aa", "GPU-81aa-bb", "GPU-99"]) == (MIXED[1][1], MIXED[2][1], "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert process.accelerator_kinds(["2", "1", "7"]) == (MIXED[2][1], MIXED[1][1], "")


def test_alike_ones_are_known_by_any_number(cards: Path) -> None:
    write_cards(cards, *MIXED[::2])
    assert process.accelerator_kinds(["1", "0", "MIG-x"]) == (MIXED[0][1],) * 3


@pytest.mark.parametrize("backend", ["local", "inline"])
def test_a_pool_has_accelerators_of_the_kind_that_it_asks_for(
    cards: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    write_cards(cards, *MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with podium.connect(backend) as cluster, pytest.raises(PlacementError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        cluster.pool(1, gpus=1, accelerator="L40S")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with podium.connect(backend) as cluster:
        assert [slot.devices for slot in cluster.pool(2, gpus=1, accelerator="a100 80gb")] == [(0,), (2,)]
        with pytest.raises(PlacementError, match=r"asked for 1 gpu on 1 node of the kind 'A100'; 0 gpu free"):
            cluster.pool(1, gpus=1, accelerator="A100")
        with pytest.raises(
            PlacementError, match=r"no node has any: the kinds are \['NVIDIA A100-SXM4-80GB', 'NVIDIA L40S'"
        ):
            cluster.pool(1, gpus=1, accelerator="A10")
        pool = cluster.pool(spread=1, gpus=0.5, accelerator="L40S")
        assert [slot.devices for slot in pool] == [(1,)]
        if backend == "local":
            group = cluster.start(podium.Worker.bind(), pool, distributed=False).group
            assert group.run(lambda worker: os.environ["CUDA_VISIBLE_DEVICES"]) == ["1"]
