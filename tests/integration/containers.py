"""Images for tests in real containers, made of this machine's own Python, because a test downloads nothing."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["PYTHON", "use_image"]

PYTHON = os.path.realpath(sys.executable)
"""The interpreter, at the same path in the image."""

_NEEDLESS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
_LIMITS = ("--memory=1g", "--cpus=1", "--pids-limit=64", "--cap-drop=ALL", "--security-opt=no-new-privileges")


@contextmanager
def use_image(runner: str, program: str) -> Iterator[str]:
    """Import an image with Python and ``program`` at /agent.py. Gives its name; the test is skipped where the runner
    starts no container."""
    if shutil.which(runner) is None:
        pytest.skip(f"{runner} is not installed")
    name = f"podium-test-{os.getpid()}"
    imported = subprocess.run([runner, "import", "-", name], input=_pack(program), capture_output=True)
    if imported.returncode:
        pytest.skip(f"{runner} imports no image: {imported.stderr.decode()[-300:].strip()}")
    try:
        trial = subprocess.run(
            [runner, "run", "--rm", *_LIMITS, name, PYTHON, "-I", "-c", ""], capture_output=True, text=True
        )
        if trial.returncode:
            pytest.skip(f"{runner} starts no container here: {trial.stderr[-300:].strip()}")
        yield name
    finally:
        subprocess.run([runner, "rmi", "--force", name], capture_output=True, check=False)


def _pack(program: str) -> bytes:
    """An archive of the interpreter, its libraries and modules, and the program."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        modules = Path(os.__file__).parent
        loaders = ["ldd", PYTHON, *map(str, (modules / "lib-dynload").glob("*.so"))]
        loaded = subprocess.run(loaders, capture_output=True, text=True, check=False).stdout
        for path in (PYTHON, *sorted({*re.findall(r"(/\S+)(?= \(0x)", loaded)})):
            archive.add(os.path.realpath(path), path)
        for top in sorted(modules.iterdir()):
            if top.name not in _NEEDLESS and not top.name.startswith("config-"):
                archive.add(top, str(top), filter=lambda entry: None if _is_needless(entry.name) else entry)
        head = tarfile.TarInfo("agent.py")
        head.size, head.mode = len(program.encode()), 0o644
        archive.addfile(head, io.BytesIO(program.encode()))
        for folder in ("tmp", "work"):
            head = tarfile.TarInfo(folder)
            head.type, head.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(head)
    return packed.getvalue()


def _is_needless(name: str) -> bool:
    return not _NEEDLESS.isdisjoint(name.split("/"))
