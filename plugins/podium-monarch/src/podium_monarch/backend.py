# Monarch is not installed where types are checked, so all its names are unknown.
# pyright: basic, reportMissingImports=false
"""The backend ``monarch``: worker processes are procs of this machine's Monarch host, one proc mesh of one proc each.

    any thread ──ProcessHandle.invoke──▶ actor ``ProcessActor`` of the proc
    thread "podium-monarch" ◀── port ── answers of all worker processes
                            ◀── port ── deaths, put there behind the answers that are in by then
    a thread each      ◀── the kernel: its process has ended

A process has one Monarch runtime, which its first cluster starts and which ends with the process. A call in flight
cannot be taken back from Monarch; Podium's own cancel request reaches the worker process beside it. Its supervision saw
about one death in ten late or never, so the kernel is asked; supervision is heard for the cause, which whoever reaps
the process first takes away.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final
from weakref import WeakValueDictionary

# How often Monarch looks for a proc's end: once a second unless told, and told only here.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "50ms")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import Channel, default_bootstrap_cmd, this_host
from monarch.config import configure

from podium.backends.files import Files, Log
from podium.backends.process import Surroundings, accelerators, environment_of, machine
from podium.errors import WorkerStartError
from podium.exceptions import read_text
from podium.processes import describe_exit, is_stopped
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.codec import decode
from podium.runtime.messages import Capabilities, Death, Node, OnDeath, ProcessSpec, Reply, Request
from podium_monarch.actor import Message, Parcel, ProcessActor, pack

__all__ = ["MonarchBackend"]

KILL_S = 10.0
LANDING_S = 0.02  # for answers that a process sent just before it ended
SAID_S = 1.0  # for Monarch to say how a process ended
NAME = "podium_process_"

Done = Callable[[Reply], None]
_keys = itertools.count(1)
_by_key: WeakValueDictionary[int, _MonarchProcess] = WeakValueDictionary()  # of all clusters, for the one fault hook


class MonarchBackend(Backend):
    """Args:
    preload: Modules that every worker process imports before its workers are made.
    log_dir: Directory for the output of each worker process, ``LABEL.log``. Default: a private directory.
    echo: Also print that output here, each line with its worker's label. Default: unless there is a ``log_dir``.
    """

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True, exit_status=False)

    def __init__(
        self, *, preload: Sequence[str] = ("torch",), log_dir: str | Path | None = None, echo: bool | None = None
    ) -> None:
        self.preload = tuple(preload)
        self.accelerators = accelerators()
        self.files = Files(log_dir, echo)
        self.processes: dict[int, _MonarchProcess] = {}
        self._closed = False
        configure(
            message_delivery_timeout="24h", mesh_bootstrap_enable_pdeathsig=False
        )  # the actor sees to that, and more
        if monarch.actor.unhandled_fault_hook is not _on_fault:
            _others.append(monarch.actor.unhandled_fault_hook)
            monarch.actor.unhandled_fault_hook = _on_fault
        self.answers, self._incoming = Channel[Any].open()
        self._reader = threading.Thread(target=self._read, name="podium-monarch", daemon=True)
        self._reader.start()

    # -- contract ------------------------------------------------------------------------------------------------

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        return machine(accelerators())

    def nodes(self) -> Sequence[Node]:
        return machine(self.accelerators)

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        processes = [_MonarchProcess(self, spec, on_death) for spec in specs]
        for process in processes:
            try:
                process.settled()
            except Exception as error:
                for other in processes:
                    other.kill()
                    self.processes.pop(other.key, None)
                words = "\n".join(process.log.last_lines())
                raise WorkerStartError(
                    f"{process.label}: its Monarch proc did not start: {read_text(error)}\n{words}", rank=process.rank
                ) from error
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        return self.files.rendezvous()

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument")

    def unpack(self, payload: Parcel) -> Any:
        return decode(*payload, "the result")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for process in list(self.processes.values()):
            process.kill()
        self.answers.send(None)
        self._reader.join()
        self.files.close()

    def _read(self) -> None:
        while (message := self._incoming.recv().get()) is not None:
            process = self.processes.get(message[0])
            if process is not None and len(message) == 2:
                del self.processes[process.key]
                process.end(message[1])
            elif process is not None:
                process.answered(*message[1:])


class _MonarchProcess(ProcessHandle):
    """One proc, as the controller sees it, and the actor in it."""

    def __init__(self, backend: MonarchBackend, spec: ProcessSpec, on_death: OnDeath) -> None:
        self.key = next(_keys)
        self.rank = spec.rank
        self.label = spec.label
        self.log = backend.files.begin_log(spec.label)
        self._answers = backend.answers
        self._on_death = on_death
        self._ended = threading.Event()
        self._pending: dict[int, Done] = {}
        self._started: Future[None] = Future()
        self._said: SimpleQueue[str] = SimpleQueue()
        _by_key[self.key] = self
        name, env = f"{NAME}{self.key}", environment_of(spec, backend.accelerators)
        start = _command(self.log.path).with_env(env)
        self._procs = this_host().spawn_procs({"procs": 1}, name=name, bootstrap_command=start)
        self._actor: Any = self._procs.spawn(name, ProcessActor, backend.answers, self.key)
        backend.processes[self.key] = self
        how = Surroundings.here(spec.threads, backend.preload), spec.timeout_s
        threading.Thread(target=self._attend, args=how, name="podium-monarch-process", daemon=True).start()

    def settled(self) -> None:
        """Wait until the actor works as the controller does, or raise why it does not."""
        self._started.result()

    def invoke(self, request: Request, done: Done) -> None:
        if request.wire is None:
            head = (request.number, request.target, request.method, request.wants_result, request.concurrent)
            request.wire = Message(*head, request.shared, request.own)
        self._pending[request.number] = done
        if not self._ended.is_set():
            with contextlib.suppress(SupervisionError):  # it has ended, and its end is on the way
                self._actor.invoke.broadcast(request.wire)

    def kill(self) -> None:
        self._started.exception()
        if self.pid and not self._ended.is_set():
            self.say("killed by its controller")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ended.wait(KILL_S)

    def answered(self, number: int, status: Any, started_ns: int, ended_ns: int, payload: Parcel) -> None:
        """One of its calls ended."""
        if (done := self._pending.pop(number, None)) is not None:
            done(Reply(status, payload, started_ns, ended_ns))

    def end(self, cause: str) -> None:
        """Its process is gone."""
        self._pending.clear()
        self._on_death(self.rank, Death(cause, self.log.last_lines()))
        self._ended.set()

    def say(self, cause: str) -> None:
        """Hear how the process ended, or why it is about to."""
        self._said.put(cause)

    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def _attend(self, surroundings: Surroundings, timeout_s: float) -> None:
        """From start to end, in a thread: Monarch refuses to wait in one that runs an event loop."""
        try:
            pid: int = self._actor.settle_in.call_one(os.getpid(), surroundings).get(timeout=timeout_s)
            process = os.pidfd_open(pid)
            self.pid, self.log = pid, Log(self.log.path, self.log.path.stat().st_size)
        except Exception as error:  # noqa: BLE001 - raised again where the start is waited for
            with contextlib.suppress(Exception):
                self._procs.stop().get(timeout=KILL_S)
            is_late = isinstance(error, TimeoutError)  # Monarch's has no message
            self._started.set_exception(TimeoutError(f"no answer within {timeout_s:.3g} s") if is_late else error)
            return
        self._started.set_result(None)
        cause = _end_of(process)
        os.close(process)
        with contextlib.suppress(ProcessLookupError):  # what it started ends with it
            os.killpg(self.pid, signal.SIGKILL)
        time.sleep(LANDING_S)
        if not cause:
            cause = "its process ended, and Monarch has not reported how"
            with contextlib.suppress(Empty):
                cause = self._said.get(timeout=SAID_S)
        self._answers.send((self.key, cause))


_REDIRECT: Final = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.dup2(log, 1), os.dup2(log, 2)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _command(log_path: Path) -> Any:
    """Return Monarch's own command, with the output into the log from the first byte on.

    The redirection is not left to a shell: dash drops variables whose names are no identifiers of a shell.
    """
    command = default_bootstrap_cmd()
    command.args = ["-I", "-S", "-c", _REDIRECT, str(log_path), command.program, *command.args]
    command.program = sys.executable
    return command


_others: list[Callable[[MeshFailure], object]] = []


def _on_fault(failure: MeshFailure) -> None:
    """In place of Monarch's hook, which ends the whole process. A proc's log forwarder fails along with its actor."""
    own = re.match(rf"{NAME}(\d+)", failure.mesh_name)
    if own is not None:
        if (process := _by_key.get(int(own[1]))) is not None:
            process.say(str(failure).splitlines()[-1].strip().removesuffix(")"))
    elif not failure.mesh_name.startswith("logger-"):
        _others[0](failure)


def _end_of(process: int) -> str:
    """Wait until a child has ended: how, or "" if Monarch took its status first."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT)
        if found is not None:
            return describe_exit(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
    return ""
