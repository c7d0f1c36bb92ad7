"""Agents beyond the loopback: in a network of their own, as in a container, and under another user."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import podium
from podium import Cluster
from podium.errors import NoRowsError
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, InferenceConfig, build_config
from podium_inference import evaluate_model
from tests.integration.test_environments import TEMPLATE, config_of
from tests.integration.training import MODEL, metrics_rows, tiny, train
from tests.integration.worlds import digits

pytest.importorskip("uvicorn")

TOKEN = "the-token-of-the-service"
OUTSIDE = "podium_agents.environments.outside:Outside"

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
    (tmp_path / "agent.py").write_text(AGENT)
    command = ["ip", "netns", "exec", name, sys.executable, "-I", "-S", str(tmp_path / "agent.py")]
    options = {"command": command, "replace": ["127.0.0.1", host]}
    with pytest.raises(NoRowsError, match="Connection refused"):
        train(config_of("program", tmp_path, options=options, run={"steps": 1}, eval={"items": 0}))


class Elsewhere(threading.Thread):
    """A service that has tasks of its own: it opens a session for each, asks the model, and rewards digits. Held-out
    tasks earn 1 if their number is odd."""

    def __init__(self, url: str, tasks: Iterator[str], judge: Callable[[str, str], float]) -> None:
        super().__init__(daemon=True)
        self.url, self.tasks, self.judge, self.statuses = url, tasks, judge, Counter[int]()
        self.over = threading.Event()

    def run(self) -> None:
        task = next(self.tasks)
        while not self.over.is_set():
            status, session = post(f"{self.url}/sessions", TOKEN, {"task": task, "wait_s": 5})
            self.statuses[status] += 1
            if status != 200:
                self.over.wait(0.05)
                continue
            ask = {"messages": [{"role": "user", "content": task}], "model": session["model"]}
            status, answer = post(f"{session['base_url']}/chat/completions", session["api_key"], ask)
            item = session["task"]["number"] if session["evaluation"] else None
            if status == 200:
                said = answer["choices"][0]["message"]["content"]
                reward = self.judge(task, said) if item is None else float(item % 2)
                post(f"{self.url}/sessions/{session['id']}/end", TOKEN, {})
                post(f"{self.url}/sessions/{session['id']}/reward", TOKEN, {"reward": reward})
            if item is None:
                task = next(self.tasks)


def post(url: str, token: str, body: Any) -> tuple[int, Any]:
    """Post JSON. Returns the status, 0 where nobody listens, and the answer."""
    head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, None


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def train_outside(
    folder: Path,
    port: int,
    backend: Any,
    judge: Callable[[str, str], float] = lambda task, said: digits(said),
    *,
    tasks: Sequence[str] = ("01=", "23=", "45=", "67="),
    **sections: Any,
) -> Path:
    """Train on the sessions of a service."""
    config = tiny(
        GRPOConfig, folder,
        **{
            "environment": {"name": OUTSIDE, "options": {"ports": port, "open_limit_s": 60, "reward_limit_s": 60}},
            "eval": {"items": 0},
            "data": {"train": "", "chat_template": str(folder / "chat.jinja")},
            **sections,
        },
    )  # fmt: skip
    (folder / "chat.jinja").write_text(TEMPLATE)
    lock, n = threading.Lock(), config.sampling.n
    shared = (task for task in itertools.cycle(tasks) for _ in range(n))

    def take() -> Iterator[str]:
        while True:
            with lock:
                task = next(shared)
            yield task

    services = [Elsewhere(f"http://127.0.0.1:{port}", take(), judge) for _ in range(4)]
    for service in services:
        service.start()
    try:
        return train(config, backend)
    finally:
        for service in services:
            service.over.set()
        for service in services:
            service.join()


def test_a_service_elsewhere_is_trained(
    tmp_path: Path, port: int, preloaded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODIUM_TOKEN", TOKEN)
    run = train_outside(tmp_path, port, preloaded, eval={"items": 5, "every": 1})
    rows = metrics_rows(run)
    assert [row[metrics.SESSIONS_FAILED] for row in rows] == [0, 0]
    assert [row[metrics.SESSIONS_ROWS] for row in rows] == [16, 16]
    assert all(row[metrics.MISMATCH_MAX] < 1e-5 for row in rows)
    evaluations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"eval"' in line]
    assert [(row["step"], row["accuracy"], row["items"]) for row in evaluations] == [
        (0, 0.4, 5),
        (1, 0.4, 5),
        (2, 0.4, 5),
    ]


def test_a_model_is_evaluated_by_a_service_elsewhere(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `podium eval` does it: all sessions are of the evaluation. Half of its tasks earn 1."""
    monkeypatch.setenv("PODIUM_TOKEN", TOKEN)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    options = {"ports": port, "open_limit_s": 60, "reward_limit_s": 60}
    values = {
        "environment": {"name": OUTSIDE, "options": options},
        "eval": {"items": 6},
        "model": MODEL,
        "data": {"chat_template": str(tmp_path / "chat.jinja")},
        "sampling": {"max_new_tokens": 3},
    }
    service = Elsewhere(f"http://127.0.0.1:{port}", itertools.repeat("01="), lambda task, said: 1.0)
    service.start()
    try:
        with podium.connect("inline") as cluster:
            evaluations = evaluate_model(build_config(InferenceConfig, values), cluster)
    finally:
        service.over.set()
        service.join()
    assert (evaluations[""].items, evaluations[""].figures["accuracy"]) == (6, 0.5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_model_learns_from_a_service_elsewhere(
    backend: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns to copy a digit, which only the service knows to be what it wants."""
    monkeypatch.setenv("PODIUM_TOKEN", TOKEN)
    run = train_outside(
        tmp_path, port, backend, lambda task, said: float(said[:1] == task[:1]),
        tasks=[f"{number}=" for number in range(4)],
        sampling={"max_new_tokens": 1, "n": 16}, batch={"prompts": 4}, run={"steps": 40}, optim={"lr": 1e-2},
    )  # fmt: skip
    rewards = [row[metrics.REWARD_MEAN] for row in metrics_rows(run)]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
