"""What surrounds a run, such as its directories, proxies and interpreter: the run does what was meant, or says what is
in its way."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from podium.config import config_to_dict
from podium.errors import ConfigError
from podium.processes import make_private_directory, temporary_directory
from podium.trainer import GRPOConfig, build_config
from podium_rewards.endpoint import Endpoint
from tests.integration.test_environments import config_of
from tests.integration.training import metrics_rows, tiny, train

BEST: dict[str, Any] = {"save": {"every": 1, "keep": 1, "keep_best": 1}, "eval": {"items": 4, "every": 1}}
WITHOUT_DOCSTRINGS = """
from podium.errors import ConfigError
from podium.models import ModelConfig, load_model
from podium_agents import tool

def add(a: int, b: int) -> int:
    "Add two numbers."

for make in (lambda: tool(add), lambda: load_model(ModelConfig(config={"model_type": "qwen3"}, tokenizer="chars:01"))):
    try:
        make()
    except ConfigError as error:
        print(error)
"""


def relative(config: GRPOConfig) -> GRPOConfig:
    """The configuration with a relative directory of runs."""
    values = config_to_dict(config)
    values["run"]["dir"] = "runs"
    return build_config(GRPOConfig, values)


def check_whole(run: Path) -> None:
    """Check that a run of two steps has all of its files."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_checkpoint"] is not None
    assert len(metrics_rows(run)) == 2
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "checkpoints" / "latest").resolve().is_dir()
    assert not [*(run / "checkpoints").glob(".*")]


def test_a_reward_that_changes_the_working_directory_leaves_the_run_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()

    def wander(completion: str, answer: str) -> float:
        os.chdir(elsewhere)
        return float(completion == answer)

    train(relative(tiny(GRPOConfig, tmp_path, **BEST)), reward=wander)
    check_whole(tmp_path / "runs" / "run")
    assert [*elsewhere.iterdir()] == []


def test_a_link_to_the_runs_that_leads_elsewhere_by_now_leaves_the_run_whole(tmp_path: Path) -> None:
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    (runs := tmp_path / "runs").symlink_to(first)

    def turn(completion: str, answer: str) -> float:
        runs.unlink()
        runs.symlink_to(second)
        return float(completion == answer)

    train(tiny(GRPOConfig, tmp_path, **BEST), reward=turn)
    check_whole(first / "run")
    assert [*second.iterdir()] == []


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_agents_reach_the_model_although_a_proxy_is_set(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Port 9 of loopback discards what comes, and nothing listens there."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    options = {"temperature": 1.0, **({"processes": processes} if processes else {})}
    run = train(config_of("agent", tmp_path, options=options, run={"steps": 1}, eval={"items": 0}))
    assert len(metrics_rows(run)) == 1
    if not processes:  # otherwise it is the environment of another process
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1"


class Judge(BaseHTTPRequestHandler):
    """Answers each request with a score."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"score": 0.5}')

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_judge_of_this_machine_is_asked_without_a_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://{host}:{server.server_port}"
        judge = Endpoint("the judge", "judge", url, "", 30.0, 1, {}, "with a score")
        assert asyncio.run(judge.send({}, lambda answer: answer["score"], is_last=True)) == 0.5
        server.shutdown()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a\nb", "caf\udce9"])
def test_a_directory_for_temporary_files_that_no_address_can_hold_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs met at the file `a`, where torch.distributed reads the path up to the mark."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    for make in (make_private_directory, temporary_directory):
        with pytest.raises(
            ConfigError, match=r"the directory for temporary files is '.*', and .*: set TMPDIR to one without"
        ):
            make()
    assert [*(tmp_path / name).iterdir()] == []


def test_a_machine_without_a_directory_for_temporary_files_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match=r"No usable temporary directory .*: set TMPDIR to a directory"):
        make_private_directory()


@pytest.mark.exhaustive
def test_without_docstrings_models_and_tools_say_what_to_do() -> None:
    """PYTHONOPTIMIZE=2 came to "makes no causal language model", and tools had no description."""
    command = [sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    of_tool, of_model = done.stdout.splitlines()
    assert of_tool.startswith("the tool 'add' is described to the model by its docstring")
    assert all(line.endswith("without -OO, and set PYTHONOPTIMIZE to at most 1") for line in (of_tool, of_model))
