from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from podium.devices import (
    autocast,
    choose_device,
    compute_dtype,
    parse_dtype,
    random_state,
    round_by_name,
    set_random_state,
)
from podium.errors import ConfigError
from tests.warm_python import run_python

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_rounding_by_name_keeps_the_mean_and_what_is_exact(dtype: torch.dtype, step: float) -> None:
    values = torch.tensor([1.0, -1.0, 1.0 + step / 8, -1.0 - step / 8, 3e-7, 0.0, 2 - step, 1.5 * 2.0**-14])
    rounded = torch.stack([round_by_name(values, str(number), dtype).float() for number in range(4000)])
    for exact in (0, 1, 5, 6, 7):
        assert torch.equal(rounded[:, exact], values[exact].expand(4000))
    assert set(rounded[:, 2].tolist()) == {1.0, 1.0 + step}
    assert set(rounded[:, 3].tolist()) == {-1.0, -1.0 - step}
    torch.testing.assert_close(rounded.mean(0), values, rtol=3e-3, atol=2e-9)
    assert torch.equal(round_by_name(values, "a", dtype), round_by_name(values, "a", dtype))
    assert torch.equal(round_by_name(values, "a", torch.float32), values)


def test_without_devices_of_its_own_a_worker_computes_on_the_cpu() -> None:
    assert choose_device() == CPU
    assert choose_device(()) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to find")
def test_a_device_that_torch_does_not_see_is_an_error() -> None:
    with pytest.raises(ConfigError, match="owns device 3"):
        choose_device((3, 4))


@pytest.mark.gpu
def test_a_device_of_its_own_is_used() -> None:
    assert choose_device((0,)) == torch.device("cuda", 0)
    assert compute_dtype(torch.device("cuda", 0)) == torch.bfloat16


def test_precision_follows_the_device_unless_wished_otherwise() -> None:
    assert compute_dtype(CPU) == torch.float32
    assert compute_dtype(CPU, "bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match="precision='fp8'"):
        compute_dtype(CPU, "fp8")
    with pytest.raises(ConfigError, match=r"model\.dtype='half'.*float16"):
        parse_dtype("half", key="model.dtype")


def test_autocast_to_bfloat16_and_not_at_all_for_float32() -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with autocast(CPU, torch.float32):
        assert not torch.is_autocast_enabled("cpu")


def test_random_state_goes_on_from_where_it_was() -> None:
    state = random_state(CPU)
    first = torch.rand(3)
    set_random_state(CPU, state)
    assert torch.equal(torch.rand(3), first)


NPU = """
import sys, types, torch
from podium.devices import choose_device, collectives_of
from podium.runtime.worker import WorkerContext
from podium.runtime.worker_process import WorkerProcess

assert collectives_of((0,)) == ("gloo", None), "torch sees no accelerator"
torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.is_available, npu.set_device = lambda: True, lambda device: None
torch._register_device_module("npu", npu)
print(*collectives_of((1, 2)), *collectives_of(()))
print(choose_device((1, 2)))
torch.distributed.init_process_group = lambda backend, device_id, **how: print(backend, device_id)
context = WorkerContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", devices=(0,), role="one", threads=1,
    rendezvous="file:///dev/null", meshes={},
)
WorkerProcess()._join(context)
"""


def test_npus_have_hccl_for_their_collectives() -> None:
    """With a module in the place of torch_npu, in a process of its own."""
    done = run_python("-c", NPU)
    assert done.stdout.splitlines() == ["cpu:gloo,npu:hccl npu:1 gloo None", "npu:1", "cpu:gloo,npu:hccl npu:0"], (
        done.stderr
    )


_TEAMS = """
import json, os, threading, time, torch
from podium.devices import end_idle_threads

def threads():
    return len(os.listdir("/proc/self/task"))

def settled():  # a thread that was told to end is among those of the process for a moment more
    found = None
    while found != (found := threads()):
        time.sleep(0.5)
    return found

torch.set_num_threads(3)
torch.ones(1 << 20).exp()
own = threads()
left = []

def compute(end):
    torch.ones(1 << 20).exp()
    before = threads()
    if end:
        end_idle_threads()
    left.append((before - own, settled() - own))

for end in (False, True):
    thread = threading.Thread(target=compute, args=(end,))
    thread.start()
    thread.join()
    settled()
end_idle_threads()
print(json.dumps([own, left, settled()]))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows the threads of a process")
def test_a_thread_that_leaves_the_cores_ends_its_helpers() -> None:
    done = run_python("-c", _TEAMS)
    own, left, alone = json.loads(done.stdout)
    assert left == [[3, 3], [3, 1]], "the thread itself, and the two that computed with it"
    assert alone == own - 2
