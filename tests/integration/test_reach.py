"""Agents beyond the loopback: in a network of their own, as in a container, and under another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.telemetry import metrics
from tests.integration.test_environments import config_of
from tests.integration.training import metrics_rows, train

pytest.importorskip("uvicorn")

AGENT = """
import json, os, sys, urllib.error, urllib.request

"".encode("idna")  # whose module another user may not be able to read later
os.setgroups([])
os.setgid(65534)
os.setuid(65534)  # another user than the one who trains
url, key, model, prompt = sys.argv[1:]


def ask(address, messages, key=key):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(address + "/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


messages = [{"role": "user", "content": prompt}]
messages += [ask(url, messages), {"role": "user", "content": "="}]
base, _, name = url.removesuffix("/v1").rpartition("/")
call, _, number = name.rpartition("-")
for address, other in [(f"{base}/{call}-{(int(number) + 1) % 16}/v1", key), (url, "none"), (url, "")]:
    try:
        ask(address, messages, other)
        sys.exit("was let in")
    except urllib.error.HTTPError as error:
        if error.code not in (401, 404):
            raise
print(ask(url, messages)["content"])
"""


@pytest.fixture
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace, by its name, and the address by which it reaches this one."""
    name, net = f"podium-{os.getpid()}", f"10.213.{os.getpid() % 250}"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("a second network namespace needs root and the program ip (iproute2)")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine allows no second network namespace: {made.stderr.strip()}")
    ours, theirs = f"pd{os.getpid()}a", f"pd{os.getpid()}b"
    commands = [
        f"ip link add {ours} type veth peer name {theirs} netns {name}",
        f"ip addr add {net}.1/30 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} addr add {net}.2/30 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            if (done := subprocess.run(command.split(), capture_output=True, text=True)).returncode:
                pytest.skip(f"this machine allows no pair of network devices: {done.stderr.strip()}")
        yield name, f"{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)


def test_an_agent_in_another_network_and_of_another_user_is_trained(namespace: tuple[str, str], tmp_path: Path) -> None:
    name, host = namespace
    (tmp_path / "agent.py").write_text(AGENT)
    command = ["ip", "netns", "exec", name, sys.executable, "-I", "-S", str(tmp_path / "agent.py")]
    options = {"command": command, "host": host, "ports": "20000-29999"}
    run = train(config_of("program", tmp_path, options=options, run={"steps": 1}, eval={"items": 0}))
    (row,) = metrics_rows(run)
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_TURNS], row[metrics.SESSIONS_ROWS]) == (0, 2, 16)
    assert row[metrics.MISMATCH_MAX] < 1e-5


def test_without_a_host_an_agent_in_another_network_reaches_nothing(namespace: tuple[str, str], tmp_path: Path) -> None:
    name, host = namespace
    from podium.errors import NoRowsError

    (tmp_path / "agent.py").write_text(AGENT)
    command = ["ip", "netns", "exec", name, sys.executable, "-I", "-S", str(tmp_path / "agent.py")]
    options = {"command": command, "replace": ["127.0.0.1", host]}
    with pytest.raises(NoRowsError, match="Connection refused"):
        train(config_of("program", tmp_path, options=options, run={"steps": 1}, eval={"items": 0}))
