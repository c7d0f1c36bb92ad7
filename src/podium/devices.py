"""The one place that knows kinds of devices: choice, autocast, synchronisation, memory, collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import torch

from podium.errors import ConfigError

__all__ = [
    "DTYPES",
    "autocast",
    "choose_device",
    "collective_backend",
    "compute_dtype",
    "free_memory",
    "memory_peak_bytes",
    "parse_dtype",
    "synchronize",
]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COLLECTIVES: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


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
    _module(device).set_device(device)
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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; the CPU always has."""
    if device.type != "cpu":
        _module(device).synchronize(device)


def memory_peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors took on the device so far; 0 for the CPU, which torch does not count."""
    return 0 if device.type == "cpu" else int(_module(device).max_memory_allocated(device))


def free_memory(device: torch.device) -> None:
    """Give torch's cached blocks back to the device, so that another process can have them."""
    if device.type != "cpu":
        _module(device).empty_cache()


def collective_backend(device: torch.device) -> str:
    """torch.distributed's backend for tensors on this device."""
    return _COLLECTIVES.get(device.type, "gloo")


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # present once torch_npu is imported
    return "npu" if npu is not None and npu.is_available() else None


def _module(device: torch.device) -> ModuleType:
    return torch.get_device_module(device)
