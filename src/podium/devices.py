"""The one place that knows kinds of devices: choice, precision, memory, random state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from podium.errors import ConfigError

__all__ = [
    "DTYPES",
    "accelerator_count",
    "autocast",
    "choose_device",
    "compute_dtype",
    "free_memory_bytes",
    "memory_peak_bytes",
    "parse_dtype",
    "random_state",
    "set_random_state",
]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, *, key: str = "dtype") -> torch.dtype:
    """The torch dtype called ``name``; ``key`` is the setting that an error names.

    Raises:
        ConfigError: not one of :data:`DTYPES`.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError(f"{key}={name!r} is unknown; choose one of {', '.join(DTYPES)}") from None


def choose_device(indices: Sequence[int] = ()) -> torch.device:
    """The worker's device: the first accelerator it owns (``ctx.devices``), else the CPU.

    Raises:
        ConfigError: an index was given but torch sees no accelerator.
    """
    if not indices:
        return torch.device("cpu")
    kind = _accelerator()
    if kind is None:
        raise ConfigError(
            f"this worker owns device {indices[0]}, but torch {torch.__version__} sees no CUDA or NPU here"
        )
    device = torch.device(kind, indices[0])
    torch.get_device_module(device).set_device(device)
    return device


def compute_dtype(device: torch.device, wish: str = "auto") -> torch.dtype:
    """The dtype of matrix products: ``wish``, or for "auto" bfloat16 on an accelerator and float32 on the CPU."""
    if wish != "auto":
        return parse_dtype(wish, key="precision")
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in ``dtype``; nothing at all for float32, which costs nothing then."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def memory_peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors took on the device so far; 0 for the CPU, which torch does not count."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated(device))


def free_memory_bytes(device: torch.device) -> int:
    """Memory of ``device`` that can still be had; on a CPU, what free pages and droppable caches come to together."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def accelerator_count() -> int:
    """Accelerators that this process sees."""
    return torch.cuda.device_count()


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generator for this device, uint8 on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Go on from what :func:`random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # present once torch_npu is imported
    return "npu" if npu is not None and npu.is_available() else None
