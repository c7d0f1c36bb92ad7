"""Seconds and memory of work on a device, which runs beside the script that asks for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; on a CPU there is none to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_s(work: Callable[[], object], device: torch.device, *, repetitions: int, warmups: int = 2) -> float:
    """The median seconds of ``work`` on the device, between two events of its stream; on a CPU by the clock."""
    for _ in range(warmups):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(wall_s(work, device) for _ in range(repetitions))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for before, after in marks:
        before.record()
        work()
        after.record()
    synchronize(device)
    return statistics.median(before.elapsed_time(after) for before, after in marks) / 1e3


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call of ``work``, until the device has ended it."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def reset_peak(device: torch.device) -> None:
    """Give back what torch keeps for later, and begin to count the peak anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
