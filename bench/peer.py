"""Peers: other libraries' processes, each in its own environment, asked over a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).with_name("peers")
STOP_TIMEOUT_S = 30


class PeerError(RuntimeError):
    """A peer failed; the text is its own traceback, or how its process ended."""


def python_of(peer: str) -> Path | None:
    """The interpreter of `peer`'s environment, or None if `make bench-peers` has not made it."""
    python = ROOT / ".venvs" / peer / "bin" / "python"
    return python if (python.parent.parent / ".installed").exists() else None


class PeerClient:
    """Calls a peer's methods by name, one at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def call(self, method: str, **arguments: Any) -> Any:
        """The method's result. Raises PeerError with the peer's traceback, or when the process is gone."""
        self.send(method, **arguments)
        return self.receive()

    def send(self, method: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the peer ended with code {self._process.wait()}; {self._log} says why")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer failed:\n{answer['error']}")
        return answer["result"]


def peer_command(python: Path, script: str) -> list[str]:
    """What runs `bench/peers/SCRIPT.py` in a peer's environment."""
    return [str(python), str(PEERS / f"{script}.py")]


@contextmanager
def start_peer(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[PeerClient]:
    """Run a process that speaks `bench/peers/protocol.py`; whatever else it prints goes to `log`."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield PeerClient(process, log)
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()  # its end of file is the request to stop
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
