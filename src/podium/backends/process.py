"""This machine, and what a worker process takes over from its controller: environment, directory, path, output."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import os
import random
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from podium.errors import ConfigError, DataError
from podium.lazy import without_collector
from podium.processes import LARGEST_KEPT, import_path, open_log, working_directory
from podium.runtime.messages import Node, ProcessSpec

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of memory that this machine has."""
NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KEPT_FREE = min((2 << 30) - 1, max(256 << 20, MEMORY // 24))  # bytes; mallopt takes an int
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_SIOCGIFADDR = 0x8915
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


def accelerators() -> list[str]:
    """Ids of the accelerators that this process may use, as its visibility variable spells them."""
    for variable in _VISIBILITY:
        visible = os.environ.get(variable)
        if visible is not None:
            return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
    for pattern in ("nvidia[0-9]*", "davinci[0-9]*"):
        if device_files := list(Path("/dev").glob(pattern)):
            return [str(at) for at in range(len(device_files))]
    return [str(at) for at in range(len(list(Path("/dev/dri").glob("renderD*"))))] if Path("/dev/kfd").exists() else []


def accelerator_kinds(all_devices: Sequence[str]) -> tuple[str, ...]:
    """The model of each accelerator, as NVIDIA's driver names it, and "" where that is not known.

    CUDA numbers unlike accelerators by their speed, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. Otherwise only an id such
    as "GPU-5ac2…" tells which one is meant.
    """
    models: list[tuple[str, str]] = []  # unique id and model, in the order of the bus
    for path in sorted(NVIDIA_CARDS.glob("*/information")):
        with contextlib.suppress(OSError):
            facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            models.append((facts.get("GPU UUID", "").strip(), facts.get("Model", "").strip()))
    alike = len({model for _, model in models}) == 1
    by_bus = alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    kinds: list[str] = []
    for device in all_devices:
        ids = (model for unique_id, model in models if device.startswith("GPU-") and unique_id.startswith(device))
        in_order = models[int(device)][1] if by_bus and device.isdigit() and int(device) < len(models) else ""
        kinds.append(models[0][1] if alike else next(ids, in_order))
    return tuple(kinds)


def visibility(devices: Sequence[int], all_devices: Sequence[str]) -> dict[str, str]:
    """The environment that shows a worker process its own devices and no others; empty on a machine without any."""
    if not all_devices:
        return {}
    mine = ",".join(all_devices[device] for device in devices)
    if Path("/dev/kfd").exists():
        return {"HIP_VISIBLE_DEVICES": mine}
    if list(Path("/dev").glob("davinci[0-9]*")):
        return {"ASCEND_RT_VISIBLE_DEVICES": mine}
    return {"CUDA_VISIBLE_DEVICES": mine}


def machine(all_devices: Sequence[str], nodes: int = 1) -> list[Node]:
    """This machine as a node, or as several nodes, which share its accelerators and have all the rest each.

    Raises:
        ConfigError: ``nodes`` is below 1.
    """
    if nodes < 1:
        raise ConfigError(f"connect(nodes={nodes}): expected at least one node")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count, kinds = len(all_devices), accelerator_kinds(all_devices)
    parts: list[Node] = []
    for at in range(nodes):
        indices = range(count * at // nodes, count * (at + 1) // nodes)
        has = {"cpu": float(cores), "gpu": float(len(indices)), "memory": float(MEMORY)}
        name = "localhost" if nodes == 1 else f"node-{at}"
        parts.append(Node(name, has, devices=tuple(indices), kinds=tuple(kinds[device] for device in indices)))
    return parts


def environment_of(spec: ProcessSpec, all_devices: Sequence[str]) -> dict[str, str]:
    """The variables to set before anything is imported: numbers of threads, visible devices, and the user's own."""
    threads = dict.fromkeys(THREAD_VARIABLES, spec.env.get("OMP_NUM_THREADS", str(spec.threads)))
    return {**threads, **visibility(spec.place.devices, all_devices), **spec.env}


class Surroundings(NamedTuple):
    """Where the controller works, for a worker process to work there too.

    Attributes:
        threads: Number of threads for computing.
        preload: Modules that the worker process imports before its workers are made.
    """

    threads: int
    cwd: str
    sys_path: list[str]
    preload: Sequence[str] = ()

    @classmethod
    def here(cls, threads: int, preload: Sequence[str] = ()) -> Surroundings:
        """The surroundings of this process."""
        return cls(threads, working_directory(), import_path(), preload)

    def settle_in(self, interface: str) -> None:
        """Work there from now on. gloo listens on ``interface`` unless the environment names another one."""
        faulthandler.enable(sys.stderr, all_threads=False)  # short, so that it fits into the last words
        sys.path[:] = [*self.sys_path, *(path for path in sys.path if path not in self.sys_path)]
        with contextlib.suppress(OSError):
            os.chdir(self.cwd)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        keep_freed_memory()
        random.seed()  # by the system, as in a new process: a fork has its parent's numbers to come
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.seed()
        with without_collector():
            for module in self.preload:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(self.threads)


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_FREE`` bytes that are freed, and put large tensors into huge pages. Call it before torch is
    imported.

    By itself glibc gives back all that is free above 64 MiB at every step, and a fresh page costs three times the copy
    that fills it. The user's own settings in the environment stand. Without glibc this does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's; the kernel must allow it ("madvise" or "always")
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


def run_to_the_end(run: Callable[[], None]) -> NoReturn:
    """Call ``run``, and end this process when it has returned. If it raises, print its traceback before."""
    code = 1
    try:
        run()
        code = 0
    except BaseException as error:  # noqa: BLE001 - without this thread no call ends
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def log_to(path: Path) -> None:
    """Append this process's output to ``path``. If that file cannot be opened, nothing changes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = open_log(path)
    except (OSError, DataError):
        return
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        os.dup2(log, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 - for the process's life
    os.close(log)


def interface_of(address: str) -> str:
    """The network interface that has ``address``, or "lo". By itself gloo takes the address of the machine's name,
    which is often a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"
