"""Everything that depends on the kind of a device: its choice, precision, memory and random state."""

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor, nn

from podium.errors import ConfigError

_SOFT: Final = 1  # omp_pause_soft, of omp.h
_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
LEAST_RETURNED: Final = 1 << 20
"""Bytes of the smallest block that a process returns after :func:`return_large_blocks`."""
CPUINFO: Final = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS: Final = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is Arm's
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, *, key: str = "dtype") -> torch.dtype:
    """Return the torch dtype called ``name``. Raises ConfigError, which names ``key``, if there is none in DTYPES."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_device(indices: Sequence[int] = ()) -> torch.device:
    """Return the worker's device: the first accelerator that it owns (``ctx.devices``), else the CPU.

    Raises:
        ConfigError: The worker owns an accelerator, but torch sees none.
    """
    if not indices:
        return torch.device("cpu")
    kind = _accelerator()
    if kind is None:
        raise ConfigError(
            f"this worker owns device {indices[0]}, but torch {torch.__version__} sees no CUDA or NPU here: install a "
            "torch that is built for it, or hide the devices (CUDA_VISIBLE_DEVICES='') to compute on the CPU"
        )
    device = torch.device(kind, indices[0])
    torch.get_device_module(device).set_device(device)
    return device


def collectives_of(indices: Sequence[int], *, shared: bool = False) -> tuple[str, torch.device | None]:
    """Return the backends of torch.distributed for a worker that owns these devices, and the device that it uses. That
    is none where torch sees no accelerator, and for gloo, which serves CPU and CUDA alike.

    Args:
        shared: Two ranks of the group are on one device, which NCCL refuses. gloo copies through the host's memory.

    Raises:
        ConfigError: The ranks share an NPU, which gloo does not serve.
    """
    kind = _accelerator() if indices else None
    if shared and kind == "npu":
        raise ConfigError(
            "two ranks of this group are on one NPU, where they have no collectives: give each rank an NPU of its own "
            "(lower placement.ranks), or hide the NPUs (ASCEND_RT_VISIBLE_DEVICES='') to compute on the CPU"
        )
    if kind is None or shared:
        return "gloo", None
    return f"cpu:gloo,{kind}:{'nccl' if kind == 'cuda' else 'hccl'}", torch.device(kind, indices[0])


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # present once torch_npu is imported, which torch does by itself
    return "npu" if npu is not None and npu.is_available() else None


def compute_dtype(device: torch.device, wish: str = "auto") -> torch.dtype:
    """Return the dtype of matrix products: ``wish``, or for "auto" bfloat16 on accelerators and float32 on the CPU.

    With float32 the products of parameters in bfloat16 stay in bfloat16.
    """
    if wish != "auto":
        return parse_dtype(wish, key="precision")
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def widen_kept_tensors(model: nn.Module) -> None:
    """Give the tensors float32 that models of this type keep in it, such as the routing biases of mixtures of experts.

    transformers does so where it reads a model of bfloat16 from files, and not where it makes one of a configuration.
    """
    kept = [pattern.replace("*", ".*") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype in {torch.bfloat16, torch.float16} and any(re.search(pattern, name) for pattern in kept):
            tensor.data = tensor.data.float()


def has_bfloat16() -> bool:
    """Whether this machine's processor has instructions for products in bfloat16; True where the system does not say.

    Without them torch converts each number to float32 and back.
    """
    flags = _processor_flags()
    return flags is None or bool(_BFLOAT16_FLAGS & flags)


def has_bfloat16_unit() -> bool:
    """Whether this machine's processor has a unit for products of matrices in bfloat16 (Intel's AMX)."""
    return "amx_bf16" in (_processor_flags() or set[str]())


def _processor_flags() -> set[str] | None:
    """What the processor says that it can; None where the system does not say."""
    with contextlib.suppress(OSError):
        if (flags := re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)) is not None:
            return {*flags[1].split()}
    return None


def time_matmuls(terms: int, columns: int, dtype: torch.dtype, *, rows: int = 16, count: int = 5) -> float:
    """Return the milliseconds of a product ``[rows, terms] @ [terms, columns]`` on the CPU: the least of ``count``."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(*shape, generator=generator).to(dtype) for shape in ((rows, terms), (columns, terms)))
    seconds: list[float] = []
    for _ in range(count + 1):  # the first one sets things up
        begun_s = time.perf_counter()
        torch.mm(left, right.t())
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds[1:]) * 1e3


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Compute matrix products in ``dtype`` during the block. For float32 the block changes nothing."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Round float32 to bfloat16, up or down with the probability that keeps the value on average."""
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # bfloat16 is the upper half of float32, so that the sum carries into it as often as the lower half asks for.
    return noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def round_by_name(values: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return float32 values in ``dtype``. In a coarser type they are rounded up or down at random, so that small
    differences from values of this type are kept on average; a name gets the same bits at each call on a device of one
    kind."""
    if dtype == torch.bfloat16:
        return round_stochastically(values, crc32(name.encode()))
    if dtype != torch.float16:
        return values.to(dtype)
    generator = torch.Generator(values.device).manual_seed(crc32(name.encode()))
    spacing = torch.ldexp(torch.ones_like(values), (torch.frexp(values).exponent - 11).clamp(min=-24))
    # Of 24 bits of float32, float16 keeps 11: a sum with noise of 13 bits is exact, and so are values of float16.
    noise = torch.randint(1 << 13, values.shape, device=values.device, generator=generator).float().div_(1 << 13)
    return noise.add_(values / spacing).floor_().mul_(spacing).to(dtype)


def same_within_rounding(found_TV: Tensor, expected_TV: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether vectors differ by no more than the rounding errors of a model that computes in ``dtypes``.

    The distance of each token's vector from what is expected, in units of the spread of its elements, is at most the
    square root of the coarsest type's epsilon.
    """
    actual, expected = found_TV.float(), expected_TV.float()
    distance_T = (actual - expected).square().mean(-1).sqrt() / expected.std(-1, correction=0)
    return bool((distance_T <= max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5).all())


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors took on the device so far; 0 for the CPU, which torch does not count."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated(device))


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes of ``device`` that are free; on a CPU, free pages and caches that the system can drop."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def total_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that an accelerator has; None for a CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory: pinned, which copies fastest, if it comes from an accelerator."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor)


def give_back_memory(device: torch.device) -> None:
    """Give memory of ``device`` that torch holds for later, and no tensor uses, to other processes."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def return_large_blocks(device: torch.device) -> None:
    """Let this process return large blocks of host memory to the system as soon as they are freed, if ``device`` is the
    CPU and the C library is glibc.

    glibc otherwise keeps blocks of up to 32 MiB for later once such a block was freed, and a process that gathers one
    layer after another comes to hold as much as several of them.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LEAST_RETURNED)


def return_free_blocks(device: torch.device) -> None:
    """Return all free host memory of this process to the system, if ``device`` is the CPU and the C library is glibc.

    A model that has been loaded, and whose matrices were joined or packed, leaves free blocks that fit nothing that
    comes later.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def end_idle_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread, which get made again when it next computes on the CPU.

    Each thread that computes has its own of them. Once there are more of all than cores, GNU's OpenMP lets all sleep at
    each barrier: an engine that draws in one thread, while another has computed before, takes up to 1.7 times as long.
    So a thread calls this when it leaves the cores to another one.
    """
    openmp = _gnu_openmp()
    if openmp is not None:
        openmp.omp_pause_resource_all(_SOFT)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The library, if torch computes by it and it knows how to end threads (OpenMP 5.0)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    match = re.search(r"/.*/libgomp[^/\n]*$", maps.read_text(), re.MULTILINE)
    library = ctypes.CDLL(match[0]) if match else None
    return library if hasattr(library, "omp_pause_resource_all") else None


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator for this device, as a uint8 tensor on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a state that :func:`random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
