"""How workers in bench.suites.dataplane look at a tensor that reached them, in Podium and in every peer.

`data` is a torch tensor or a numpy array; torch is not imported here, since a raw worker has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PAGE = 4096


def first_element(data: Any) -> float:
    return float(data.reshape(-1)[0])


def touch_pages(data: Any) -> int:
    """Read one byte of each page: what a kernel maps lazily is all there afterwards."""
    flat = data.reshape(-1)
    return int(flat.view(flat.dtype if flat.dtype.itemsize == 1 else byte_type(flat))[::PAGE].sum())


def byte_type(data: Any) -> Any:
    """The dtype of one unsigned byte in the library that `data` is of."""
    if type(data).__module__.partition(".")[0] == "numpy":
        return "uint8"
    import torch

    return torch.uint8


def look(data: Any, pages: bool) -> None:
    """At every page, or at one element."""
    if pages:
        touch_pages(data)
    else:
        first_element(data)


def timed_look(read: Callable[[], Any], pages: bool) -> float:
    """Seconds inside the worker: from a reference, which `read` makes a tensor, to having looked at it."""
    started = time.perf_counter()
    look(read(), pages)
    return time.perf_counter() - started
