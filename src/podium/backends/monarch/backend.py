# pyright: basic, reportMissingImports=false
"""The backend ``monarch``: hosts are procs of this machine's Monarch host, one proc mesh of one proc each.

    any thread ──HostHandle.invoke──▶ actor ``HostActor`` of the proc
    thread "podium-monarch" ◀── port ── answers of all hosts
                            ◀── port ── deaths, put there behind the answers that are in by then
    a thread a host ◀── the kernel: its process has ended

A process has one Monarch runtime, which its first cluster starts and which ends with the process. A call in flight
cannot be taken back from Monarch; Podium's own cancel request reaches the host beside it. Monarch's supervision saw
about one death in ten late or never, so the kernel is asked; supervision is heard for the cause, which whoever reaps
the process first takes away.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

# How often Monarch looks for a proc's end: once a second unless told, and told only here.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "50ms")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import Channel, default_bootstrap_cmd, this_host
from monarch.config import configure

from podium.backends.devices import accelerators, visibility
from podium.backends.logs import LogEcho, last_lines
from podium.backends.monarch.actor import HostActor, Message, Parcel, Setting, pack, read
from podium.backends.process import THREAD_VARIABLES
from podium.errors import ConfigError, WorkerStartError
from podium.runtime.backend import Backend, Capabilities, Death, HostHandle, HostSpec, Node, Reply, Request

__all__ = ["MonarchBackend"]

START_TIMEOUT_S = 120.0
KILL_S = 10.0
LANDING_S = 0.02  # for answers that a host sent just before it ended
SAID_S = 1.0  # for Monarch to say how a host ended
NAME = "podium_host_"

Done = Callable[[Reply], None]
_keys = itertools.count(1)
_by_key: WeakValueDictionary[int, _MonarchHost] = WeakValueDictionary()  # of all clusters, for the one fault hook


class MonarchBackend(Backend):
    """Args:
    preload: modules that every host imports before its workers are made.
    log_dir: where each host's output goes, ``LABEL.log``; a private directory unless given.
    echo: also print each host's output here, every line with its host's label.
    """

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True, exit_status=False)

    def __init__(
        self, *, preload: Sequence[str] = ("torch",), log_dir: str | Path | None = None, echo: bool = False
    ) -> None:
        self._preload = tuple(preload)
        self._accelerators = accelerators()
        self._private = Path(tempfile.mkdtemp(prefix="podium-monarch-"))
        self._log_dir = Path(log_dir or self._private / "logs").absolute()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._echo = LogEcho() if echo else None
        self._rendezvous = itertools.count(1)
        self._hosts: dict[int, _MonarchHost] = {}
        self._closed = False
        configure(message_delivery_timeout="24h", mesh_bootstrap_enable_pdeathsig=False)  # hosts see to that, and more
        if monarch.actor.unhandled_fault_hook is not _on_fault:
            _others.append(monarch.actor.unhandled_fault_hook)
            monarch.actor.unhandled_fault_hook = _on_fault
        self._answers, self._incoming = Channel[Any].open()
        self._reader = threading.Thread(target=self._read, name="podium-monarch", daemon=True)
        self._reader.start()

    # -- contract ------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores, gpus = len(os.sched_getaffinity(0)), len(self._accelerators)
        return [Node("localhost", {"cpu": float(cores), "gpu": float(gpus), "memory": float(pages)})]

    def start_hosts(self, specs: Sequence[HostSpec], on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        for name in specs[0].options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): monarch has no options for a host")
        hosts = [self._spawn(spec, on_death) for spec in specs]
        for host in hosts:
            try:
                host.settled()
            except Exception as error:
                for other in hosts:
                    other.kill()
                    self._hosts.pop(other.key, None)
                words = "\n".join(host.last_words())
                raise WorkerStartError(
                    f"{host.label}: its Monarch proc did not start: {error}\n{words}", rank=host.rank
                ) from error
        return hosts

    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        return f"file://{self._private}/rendezvous-{next(self._rendezvous)}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument")

    def unpack(self, payload: Parcel) -> Any:
        return read(payload, "the result")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for host in list(self._hosts.values()):
            host.kill()
        self._answers.send(None)
        self._reader.join()
        if self._echo is not None:
            self._echo.stop()
        shutil.rmtree(self._private, ignore_errors=True)

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _spawn(self, spec: HostSpec, on_death: Callable[[int, Death], None]) -> _MonarchHost:
        key = next(_keys)
        limits = dict.fromkeys(THREAD_VARIABLES, spec.env.get("OMP_NUM_THREADS", str(spec.threads)))
        env = {**limits, **visibility(spec.place.devices, self._accelerators), **spec.env}
        log_path = self._log_dir / f"{spec.label}.log"
        host = _MonarchHost(key, spec, log_path, lambda cause: self._answers.send((key, cause)), on_death)
        self._hosts[key] = _by_key[key] = host
        name = f"{NAME}{key}"
        procs = this_host().spawn_procs({"procs": 1}, name=name, bootstrap_command=_command(log_path).with_env(env))
        here = [path or os.getcwd() for path in sys.path]
        setting = Setting(os.getpid(), spec.threads, os.getcwd(), here, self._preload)
        host.settle(procs, procs.spawn(name, HostActor, self._answers, key), setting)
        if self._echo is not None:
            self._echo.follow(spec.label, log_path)
        return host

    def _read(self) -> None:
        while (message := self._incoming.recv().get()) is not None:
            host = self._hosts.get(message[0])
            if host is not None and len(message) == 2:
                del self._hosts[host.key]
                host.end(message[1])
            elif host is not None:
                host.answered(*message[1:])


class _MonarchHost(HostHandle):
    """One proc, as the controller sees it. ``tell`` takes the cause of its end to where its answers arrive."""

    def __init__(
        self,
        key: int,
        spec: HostSpec,
        log_path: Path,
        tell: Callable[[str], None],
        on_death: Callable[[int, Death], None],
    ) -> None:
        self.key = key
        self.rank = spec.rank
        self.label = spec.label
        self.log_path = log_path
        self._tell = tell
        self._on_death = on_death
        self._ended = threading.Event()
        self._pending: dict[int, Done] = {}
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self._tried = threading.Event()
        self._failure: Exception | None = None
        self._said = ""
        self._has_said = threading.Event()

    def settle(self, procs: Any, actor: Any, setting: Setting) -> None:
        """Have it take over the controller's surroundings; from then on its end is seen."""
        self._procs, self._actor = procs, actor
        threading.Thread(target=self._attend, args=(setting,), name="podium-monarch-host", daemon=True).start()

    def settled(self) -> None:
        """Wait until it has, or raise why not."""
        self._tried.wait()
        if self._failure is not None:
            raise self._failure

    def invoke(self, request: Request, done: Done) -> None:
        if request.wire is None:
            head = (request.call_id, request.target, request.method, request.wants_result, request.concurrent)
            request.wire = Message(*head, request.shared, request.own)
        self._pending[request.call_id] = done
        if not self._ended.is_set():
            with contextlib.suppress(SupervisionError):  # it has ended, and its end is on the way
                self._actor.invoke.broadcast(request.wire)

    def kill(self) -> None:
        self._tried.wait()
        if self.pid and not self._ended.is_set():
            self.say("killed by its controller")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ended.wait(KILL_S)

    def answered(self, call_id: int, status: Any, started_ns: int, ended_ns: int, payload: Parcel) -> None:
        """One of its calls ended."""
        if (done := self._pending.pop(call_id, None)) is not None:
            done(Reply(status, payload, started_ns, ended_ns))

    def end(self, cause: str) -> None:
        """Its process is gone."""
        self._pending.clear()
        self._on_death(self.rank, Death(cause, self.last_words()))
        self._ended.set()

    def last_words(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        return last_lines(self.log_path, self._log_start)

    def say(self, cause: str) -> None:
        """Monarch's supervision on how it ended."""
        self._said = cause
        self._has_said.set()

    def _attend(self, setting: Setting) -> None:
        """From start to end, in a thread: Monarch refuses to wait in one that runs an event loop."""
        try:
            pid: int = self._actor.settle_in.call_one(setting).get(timeout=START_TIMEOUT_S)
            process = os.pidfd_open(pid)
            self.pid, self._log_start = pid, self.log_path.stat().st_size
        except Exception as error:  # noqa: BLE001 - raised again where the start is waited for
            self._failure = error
            with contextlib.suppress(Exception):
                self._procs.stop().get(timeout=KILL_S)
            return
        finally:
            self._tried.set()
        cause = _end_of(process)
        os.close(process)
        with contextlib.suppress(ProcessLookupError):  # what it started ends with it
            os.killpg(self.pid, signal.SIGKILL)
        time.sleep(LANDING_S)
        if not cause:
            self._has_said.wait(SAID_S)
            cause = self._said or "its process ended; how, Monarch has not said"
        self._tell(cause)


def _command(log_path: Path) -> Any:
    """Monarch's own, with the output into the log from the first byte on."""
    command = default_bootstrap_cmd()
    command.args = ["-c", 'exec "$@" >>"$0" 2>&1', str(log_path), command.program, *command.args]
    command.program = "/bin/sh"
    return command


_others: list[Callable[[MeshFailure], object]] = []


def _on_fault(failure: MeshFailure) -> None:
    """In place of Monarch's hook, which ends the whole process. A proc's log forwarder fails along with its actor."""
    own = re.match(rf"{NAME}(\d+)", failure.mesh_name)
    if own is not None:
        if (host := _by_key.get(int(own[1]))) is not None:
            host.say(str(failure).splitlines()[-1].strip().removesuffix(")"))
    elif not failure.mesh_name.startswith("logger-"):
        _others[0](failure)


def _end_of(process: int) -> str:
    """Wait until a child has ended: how, or "" if Monarch took its status first."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT)
        if found is not None:
            by_code = found.si_code == os.CLD_EXITED
            return f"exit code {found.si_status}" if by_code else _signal(found.si_status)
    return ""


def _signal(number: int) -> str:
    return f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"signal {number}"
