"""Exploits by a second process of the same user: it reads what a process was started with, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podium.processes import Launched, command
from podium.processes.secret_handover import hide_secrets
from tests.integration.test_serve import NOBODY, OTHER_USERS

SECRET = "correct-horse-battery-7"
SOURCE = Path(__file__).parents[3] / "src" / "podium" / "processes" / "secret_handover.py"


def read_environment(pid: int) -> str:
    """What a second process of this user finds."""
    script = "import sys; print(open(f'/proc/{sys.argv[1]}/environ', 'rb').read())"
    return subprocess.run([sys.executable, "-c", script, str(pid)], capture_output=True, text=True, check=True).stdout


def test_a_launched_process_has_the_secrets_and_its_table_entry_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("PLAIN", "shown")
    launched = Launched(command("tests.unit.processes.launched"))
    try:
        frame = launched.channel.receive()
        assert frame is not None and frame[1].decode() == SECRET
        seen = read_environment(launched.process.pid)
        assert "PLAIN=shown" in seen
        assert SECRET not in seen and "MY_API_KEY" not in seen
    finally:
        launched.end()
        launched.channel.close()


def test_more_secrets_than_a_pipe_holds_stay_where_they_are() -> None:
    env, pipe = hide_secrets({"MY_API_KEY": "a" * 100_000, "X": "1"})
    assert pipe is None and env["MY_API_KEY"]
    env, pipe = hide_secrets({"X": "1"})
    assert (env, pipe) == ({"X": "1"}, None)


READER = """
import os, sys
pid = int(sys.argv[1])
for name in ("environ", "mem", "maps"):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            file.read(1) if name != "mem" else None
        print(name, "open")
    except OSError as error:
        print(name, "closed")
"""
OWNER = """
import importlib.util, os, sys, types
for name in ("podium", "podium.secrecy"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["podium.secrecy"].find_secrets = lambda env: []
exec(sys.stdin.readline().encode().decode("unicode_escape"))
if sys.argv[1] == "closed":
    close_memory()
print(os.getpid(), len(os.listdir("/proc/self/fd")) > 0, flush=True)
sys.stdin.read()
"""


@OTHER_USERS
@pytest.mark.parametrize(("how", "env"), [("open", {}), ("closed", {}), ("closed", {"PODIUM_DUMPABLE": "1"})])
def test_the_memory_of_a_process_is_closed_to_others_of_its_user(how: str, env: dict[str, str]) -> None:
    """Root reads all, so both are another user."""
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/", "text": True}
    variables = {"PATH": os.defpath, **env}
    code = SOURCE.read_text().encode("unicode_escape").decode()
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", OWNER, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, **as_nobody,  # type: ignore[call-overload]
    ) as owner:  # fmt: skip
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write(code + "\n")
        owner.stdin.flush()
        pid, lists = owner.stdout.readline().split()
        assert lists == "True", "it still sees its own descriptors"
        found = subprocess.run(
            ["/usr/bin/python3", "-c", READER, pid], capture_output=True, check=True, **as_nobody,  # type: ignore[call-overload]
        )  # fmt: skip
        owner.stdin.close()
    is_closed = how == "closed" and not env
    assert (
        found.stdout.split() == ["environ", "closed", "mem", "closed", "maps", "closed"]
        if is_closed
        else "open" in (found.stdout)
    )
