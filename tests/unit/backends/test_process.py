"""What every worker process does first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
from podium.backends.process import keep_freed_memory
keep_freed_memory()
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.zeros(2 << 20) for _ in range(24)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(*[faults() for _ in range(6)])
"""
PAGES = 24 * (8 << 20) // os.sysconf("SC_PAGE_SIZE")


def faults(**environment: str) -> list[int]:
    """Pages that a process touched anew in each of six steps, which allocate 192 MiB and free them."""
    ours = ("MALLOC_", "GLIBC_TUNABLES")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    small_pages = {"THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=clean | small_pages | environment,
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what was freed")
def test_a_step_uses_the_memory_of_those_before() -> None:
    assert faults()[-1] < PAGES // 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what was freed")
def test_what_the_user_set_stands() -> None:
    assert min(faults(MALLOC_TRIM_THRESHOLD_="65536")) > PAGES // 2
