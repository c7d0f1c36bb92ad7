"""Connect to a backend by its name."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, Final, NamedTuple

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.exceptions import describe_error, read_text
from podium.extras import explain_packages, repair_command
from podium.functions import nearest
from podium.installed import list_entry_points
from podium.processes import open_standard_streams
from podium.runtime.backend import Backend
from podium.runtime.cluster import Cluster
from podium.runtime.worker import current_context


class _Launcher(NamedTuple):
    """A program that starts a script several times, and the variables by which a process knows it.

    Attributes:
        name: The name of the program.
        size: The number of processes.
        rank: The number of this process.
        sure: Without this variable, the process of rank 0 may be the only one, which a batch system has told how many
            processes it could start.
    """

    name: str
    size: str
    rank: str
    sure: str


_LAUNCHERS: Final = (
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    _Launcher("srun", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    _Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK"),
    _Launcher("mpirun", "PMI_SIZE", "PMI_RANK", "PMI_RANK"),
    _Launcher("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
)


def backends() -> dict[str, EntryPoint]:
    """The backends that are installed, by name."""
    return {entry.name: entry for entry in list_entry_points(group="podium.backends")}


def connect(backend: str = "local", *, hints: Mapping[str, Any] | None = None, **options: Any) -> Cluster:
    """Connect to a backend by name: "inline", "local", or that of an installed package.

    Where "local" cannot run, as on macOS, "inline" takes its place, and a line on stderr says so.

    Args:
        backend: A name, or an address of the form ``NAME://…``.
        hints: Options that are dropped if the backend does not have them, such as ``log_dir`` and ``preload``.
        options: The backend's own options.

    Raises:
        ConfigError: There is no such backend (the message has the nearest name), it does not have an option, or this
            is one of several processes that a launcher such as torchrun or srun has started.
    """
    open_standard_streams()
    name, cls = _find_backend(backend, options)
    parameters = signature_of(cls).parameters
    arguments = {name: value for name, value in (hints or {}).items() if name in parameters} | _with_address(
        backend, options
    )
    return Cluster(cls(**arguments), name)


def backend_class(backend: str, options: Mapping[str, Any] | None = None) -> type[Backend]:
    """The class that :func:`connect` would make with these options. Nothing is started.

    Raises:
        ConfigError: As in :func:`connect`.
    """
    return _find_backend(backend, options or {})[1]


def _find_backend(backend: str, options: Mapping[str, Any]) -> tuple[str, type[Backend]]:
    """The name and the class of the backend, or of the one that takes its place on this system."""
    if current_context.get() is None:  # a worker has the environment of whoever started it
        _refuse_launcher(os.environ)
    name = backend.partition("://")[0]
    cls = _load_backend(name, backend)
    if (other := cls.stand_in()) is not None:
        _say(f"podium: {other[0]!r} takes the place of the backend {name!r}: {other[1]}")
        name, cls = other[0], _load_backend(other[0], other[0])
    try:
        signature_of(cls).bind(**_with_address(backend, options))
    except TypeError as error:
        raise ConfigError(f"connect({backend!r}): {error}; see help({cls.__module__}.{cls.__name__})") from error
    return name, cls


def _refuse_launcher(environment: Mapping[str, str]) -> None:
    """Refuse to run in one of several processes that a launcher has started, each of which would start all workers.

    Where rank 0 may be alone, as in a batch script of SLURM, a line on stderr says the same.

    Raises:
        ConfigError: There are other processes.
    """
    for launcher in _LAUNCHERS:
        size, rank = environment.get(launcher.size, ""), environment.get(launcher.rank, "")
        if not (size.isdecimal() and rank.isdecimal()):
            continue
        if launcher.name == "srun" and int(size) == 1:
            return  # one task of a larger allocation
        if int(size) > 1:
            line = (
                f"{launcher.name} started this process as {rank} of {size} ({launcher.rank}, {launcher.size}), and "
                "Podium starts its workers itself: run the script once, without a launcher, and set placement.ranks, "
                "or the pool in a script. For independent runs, unset these variables"
            )
            if int(rank) > 0 or launcher.sure in environment:
                raise ConfigError(line)
            _say(f"podium: if {line}")


@cache
def _say(line: str) -> None:
    """Write a line to stderr, once in this process."""
    sys.stderr.write(line + "\n")


def _load_backend(scheme: str, backend: str) -> type[Backend]:
    entries = backends()
    if scheme not in entries:
        raise ConfigError(
            f"no backend {backend!r}; installed are {', '.join(sorted(entries))}{nearest(scheme, entries)} "
            f"(docs/backends.md); {explain_packages('podium.backends', scheme)}"
        )
    entry = entries[scheme]
    try:
        cls: Any = entry.load()
    except (Exception, SystemExit) as error:
        what = read_text(error) if isinstance(error, ImportError) else describe_error(error)
        other = f"another version of the package of {entry.value}, or what that package requires"
        raise ConfigError(
            f"backend {scheme!r} cannot be loaded: {what}; try: {repair_command(entry, error) or other}"
        ) from error
    if not (inspect.isclass(cls) and issubclass(cls, Backend)):
        raise ConfigError(f"backend {scheme!r}: {entry.value} is no subclass of podium.runtime.Backend")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"backend {scheme!r}: {entry.value} does not implement {', '.join(missing)}")
    return cls


def _with_address(backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options``, and the address if ``backend`` is one."""
    return {**options, "address": backend} if "://" in backend else dict(options)
