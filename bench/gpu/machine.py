"""What the machine is, and what it can do at most: versions, what Podium builds on, rates of copies and products."""

from __future__ import annotations

import array
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.clock import device_s
from bench.gpu.stage import Stage

PACKAGES = ("podium", "torch", "transformers", "numpy", "triton", "datasets", "peft", "pydantic", "trl")
GIB = 2**30
QUEUE_S = 60


def preflight(stage: Stage) -> None:
    """Versions; descriptors, shared memory, tensors between processes, CUDA IPC and NCCL, each tried once."""
    _versions(stage)
    stage.part("gpu", lambda: _gpu(stage), cuda=True)
    stage.part("descriptors", lambda: _descriptors(stage))
    stage.part("tensor_between_processes", lambda: _between_processes(stage, torch.device("cpu")))
    stage.part("cuda_ipc", lambda: _between_processes(stage, stage.device), cuda=True)
    stage.part("collectives_gloo", lambda: _collectives(stage, "gloo", torch.device("cpu")))
    stage.part("collectives_nccl", lambda: _collectives(stage, "nccl", stage.device), cuda=True)


def rates(stage: Stage) -> None:
    """The two ceilings that every other figure is read against, and copies over the bus."""
    device, repetitions = stage.device, 3 if stage.dry else 20
    half = (8 << 20 if stage.dry else 4 << 30) // 4
    source = torch.randn(half, device=device)
    target = torch.empty_like(source)
    seconds = device_s(lambda: target.copy_(source), device, repetitions=repetitions)
    stage.figure("copy", 2 * source.nbytes / seconds / 1e12, "TB/s read and written")
    size = 256 if stage.dry else 8192
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "float32")):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = device_s(lambda left=left, right=right: left @ right, device, repetitions=repetitions)
        stage.figure(f"product_{name}", 2 * size**3 / seconds / 1e12, "TFLOP/s")
    stage.part("bus", lambda: _bus(stage, repetitions), cuda=True)
    small = torch.randn(16, device=device)
    seconds = device_s(lambda: [small.add_(1) for _ in range(1000)], device, repetitions=3)
    stage.figure("launch", seconds * 1e3, "µs an operation of 16 numbers")


def _versions(stage: Stage) -> None:
    stage.fact("python", platform.python_version())
    for package in PACKAGES:
        try:
            stage.fact(package, version(package))
        except PackageNotFoundError:
            stage.fact(package, "not installed")
    stage.fact("cuda of torch", torch.version.cuda or "none")
    stage.fact("kernel", platform.release())
    stage.fact("cores", os.cpu_count())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    stage.figure("host_memory", memory, "GiB")


def _gpu(stage: Stage) -> None:
    about: Any = torch.cuda.get_device_properties(stage.device)
    stage.fact("device", f"{about.name}, compute capability {about.major}.{about.minor}")
    stage.figure("multiprocessors", about.multi_processor_count, "")
    stage.figure("device_memory", about.total_memory / GIB, "GiB")
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        stage.fact("driver, compute mode", subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def _descriptors(stage: Stage) -> None:
    """Anonymous memory, passed on by its descriptor, and a descriptor of a process: what local workers stand on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stage.fact("open descriptors", f"{soft} at most, {hard} where asked for")
    here, there = socket.socketpair()
    fd = os.memfd_create("podium-preflight")
    os.write(fd, b"podium")
    here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    _, received, _, _ = socket.recv_fds(there, 1, 1)
    if os.pread(received[0], 6, 0) != b"podium":
        raise RuntimeError("anonymous memory that was passed on by its descriptor holds something else")
    for one in (fd, *received, os.pidfd_open(os.getpid())):
        os.close(one)
    here.close()
    there.close()
    stage.fact("descriptors", "memfd, SCM_RIGHTS and pidfd work")
    stage.figure("shared_memory", shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0, "GiB")


def _between_processes(stage: Stage, device: torch.device) -> None:
    """Give a tensor to another process, which reads and changes it where it is."""
    import torch.multiprocessing as mp

    context: Any = mp.get_context("spawn")
    given, answers = context.Queue(), context.Queue()
    process = context.Process(target=double, args=(given, answers), daemon=True)
    process.start()
    tensor = torch.arange(1 << 10, dtype=torch.float32, device=device)
    given.put(tensor)
    total = answers.get(timeout=QUEUE_S)
    process.join(QUEUE_S)
    same = total == float(tensor.sum()) == float(torch.arange(1 << 10).sum()) * 2
    if not same:
        raise RuntimeError(f"the other process saw {total}, and this one sees {float(tensor.sum())}")
    stage.fact("cuda_ipc" if device.type == "cuda" else "tensor_between_processes", "works, without a copy")


def double(given: Any, answers: Any) -> None:
    """In the other process: double a tensor in place and answer its sum."""
    tensor: Tensor = given.get(timeout=QUEUE_S)
    tensor.mul_(2)
    total = float(tensor.sum())  # waits for the device
    del tensor
    answers.put(total)


def _collectives(stage: Stage, backend: str, device: torch.device) -> None:
    """A group of one rank adds up one tensor."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1, **options)
        try:
            tensor = torch.ones(1 << 10, device=device)
            dist.all_reduce(tensor)
            if float(tensor.sum()) != len(tensor):
                raise RuntimeError(f"the sum over one rank is {float(tensor.sum())}")
        finally:
            dist.destroy_process_group()
    text = f"{backend} works"
    if backend == "nccl":
        nccl: Any = torch.cuda.nccl  # type: ignore[attr-defined] - imported by torch.cuda, and not declared there
        text += f", NCCL {'.'.join(map(str, nccl.version()))}"
    stage.fact(f"collectives_{backend}", text)


def _bus(stage: Stage, repetitions: int) -> None:
    """Copies between the device and pinned memory of the host, each way."""
    held = torch.empty(1 << 28, dtype=torch.float32, device=stage.device)
    host = torch.empty(1 << 28, dtype=torch.float32, pin_memory=True)
    for name, to, source in (("to_device", held, host), ("to_host", host, held)):
        seconds = device_s(
            lambda to=to, source=source: to.copy_(source, non_blocking=True), stage.device, repetitions=repetitions
        )
        stage.figure(f"bus_{name}", held.nbytes / seconds / 1e9, "GB/s")
