from __future__ import annotations

import pytest
import torch

from podium.devices import autocast, choose_device, compute_dtype, parse_dtype, random_state, set_random_state
from podium.errors import ConfigError

CPU = torch.device("cpu")


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
