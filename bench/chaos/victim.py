"""A run as it is seen from outside: its controller, its workers, its steps, its errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.chaos.leftovers import Process, alive, below, leftovers, process, segments
from bench.chaos.pairs import find_helper, find_worker, is_held, roles_of
from bench.chaos.spares import SURROUNDINGS
from bench.chaos.training import configuration, train
from podium.trainer.preload import PRELOAD

__all__ = ["ENDLESS", "PATIENCE_S", "Failed", "Victim"]

ENDLESS = 10**6  # steps, of a run that goes on for as long as faults follow
PATIENCE_S = 180.0  # for a run to finish its next step
GONE_S = 5.0  # for a run whose controller has ended to leave nothing


class Failed(Exception):
    """A run did not do what it must. The message says what it did."""


class Victim:
    """The run ``name`` in ``folder``, and the processes that it has or had.

    Controllers are forks of a process that has imported what they import, as an import takes seconds.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        schedule: str,
        *,
        backend: str = "local",
        options: Mapping[str, Any] | None = None,
        seed: str = "",
        gone_s: float = GONE_S,
        sessions: bool = False,
        warm: bool = False,
    ) -> None:
        self.folder, self.name, self.schedule, self.backend = folder, name, schedule, backend
        self.directory = folder / "runs" / name
        self.home = folder / name
        self.orders = self.home / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="pc-"))  # its path is short, as Ray's sockets lie below
        self.random = random.Random(seed)
        self.started = 0
        self._options = dict(options or {})
        self._gone_s, self._sessions = gone_s, sessions
        self._context = multiprocessing.get_context("forkserver")
        modules = ["bench.chaos.training", "podium.backends.local.backend"]
        if warm:
            os.environ |= SURROUNDINGS
            modules += PRELOAD
        self._warm = warm
        self._context.set_forkserver_preload(modules)
        self._controller: Any = None
        self._had: set[Process] = set()
        self._segments = segments()

    # -- its life --------------------------------------------------------------------------------------------------

    def start(self, steps: int = ENDLESS, keep: int = 2) -> None:
        """Start the run, or go on with it from its latest checkpoint, of which the last ``keep`` are kept."""
        config = configuration(self.folder, self.name, self.schedule, steps, sessions=self._sessions, keep=keep)
        arguments = (config, str(self.home), str(self.temporary), self.backend, self._options, self._warm)
        self.temporary.mkdir(exist_ok=True)
        self._controller = self._context.Process(target=train, args=arguments)
        self._controller.start()
        self.started += 1

    def running(self) -> bool:
        """Whether the controller runs."""
        return self._controller.exitcode is None

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the controller's end. Returns its exit code."""
        self._controller.join(within_s)
        if self.running():
            self.write_stacks()
            raise Failed(f"the run has not ended within {within_s:g} s")
        code: int = self._controller.exitcode
        return code

    def leaves(self) -> list[str]:
        """Say what the run has left behind, now that its controller has ended."""
        return leftovers(self._had, self.temporary, self._segments, self._gone_s)

    def end(self) -> None:
        """Kill what is left of the run, and delete its temporary files."""
        if self._controller is not None and self.running():
            self.look()
            self._controller.kill()
            self._controller.join()
        until = time.monotonic() + self._gone_s
        while any(map(alive, self._had)) and time.monotonic() < until:
            time.sleep(0.05)
        shutil.rmtree(self.temporary, ignore_errors=True)

    # -- its parts -------------------------------------------------------------------------------------------------

    @property
    def controller(self) -> int:
        """Its process id."""
        pid: int = self._controller.pid
        return pid

    def look(self) -> None:
        """Note the processes that the run has now."""
        self._had.update(filter(None, map(process, [self.controller, *below(self.controller)])))

    def worker(self, role: str) -> int:
        """The newest process that holds ``role``. Raises ProcessLookupError if there is none yet."""
        return find_worker(self.home, role)

    def helper(self, module: str) -> int:
        """The process below the controller whose command has ``module``. Raises ProcessLookupError if there is none."""
        return find_helper(self.controller, module)

    def order(self, name: str, text: str = "") -> Path:
        """Give an order, which see :mod:`bench.chaos.training`."""
        aside = self.orders / f".{name}"
        aside.write_text(text)
        return aside.rename(self.orders / name)

    # -- what it says ----------------------------------------------------------------------------------------------

    def step(self) -> int:
        """The last step in the metrics, which a resume takes back to the latest checkpoint."""
        path = self.directory / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                steps = re.findall(rb'"step": (\d+), "time"', file.read())
        except OSError:
            return 0
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step: int, within_s: float = PATIENCE_S) -> None:
        """Wait until ``step`` is finished. Raises Failed if the run ends before, or does not get there."""
        until = time.monotonic() + within_s
        while self.step() < step:
            if not self.running():
                if self.step() < step:
                    raise Failed(f"the run ended at step {self.step()}: {self.said()}")
            elif time.monotonic() > until:
                self.write_stacks()
                raise Failed(f"no step {step} within {within_s:g} s: {self.said()}")
            time.sleep(0.02)

    def wait_for_roles(self, within_s: float = PATIENCE_S) -> None:
        """Wait until a living process holds each role that the run has had. Raises Failed if one is not replaced."""
        path, until = self.home / "pids", time.monotonic() + within_s
        while lost := sorted(role for role in roles_of(path) if not is_held(path, role)):
            if not self.running() or time.monotonic() > until:
                raise Failed(f"no process holds {', '.join(lost)} at step {self.step()}: {self.said()}")
            time.sleep(0.02)

    def errors(self) -> list[dict[str, Any]]:
        """The errors that ended the run so far: type and text."""
        path = self.home / "errors.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self) -> str:
        """The end of what the run has printed."""
        path = self.home / "output"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def write_stacks(self) -> None:
        """Have all processes of a run that hangs write the stacks of their threads: the controller to ``output``, the
        workers to their logs."""
        for pid in [self.controller, *below(self.controller)]:
            with suppress(OSError):
                caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                if caught and int(caught[1], 16) & 1 << (signal.SIGUSR1 - 1):  # the signal would end any other process
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)  # until all have written

    def forget(self) -> None:
        """Delete the run and all its files."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
        self.orders.mkdir(parents=True)
