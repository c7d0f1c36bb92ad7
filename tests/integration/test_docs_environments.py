"""The code of docs/environments.md and docs/agents.md does what the pages say, in real runs."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml

from podium.cli import main
from podium.models import char_tokenizer
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium_agents import Toolbox
from podium_agents.service.chat_format import chat_format
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of
from tests.warm_python import run_python

DOCS = Path(__file__).parents[2] / "docs"


def files_of(page: str, folder: Path) -> list[str]:
    """Write the blocks of a page that begin with the name of a file. Returns their names."""
    text = (DOCS / page).read_text()
    found = re.findall(r"```(?:python|bash)\n(?:#!/bin/bash\n)?# (\w+\.(?:py|sh))(.*?)```", text, re.DOTALL)
    for name, _ in found:
        block = re.search(rf"```(?:python|bash)\n((?:#!/bin/bash\n)?# {re.escape(name)}.*?)```", text, re.DOTALL)
        assert block is not None
        (folder / name).write_text(block[1])
        (folder / name).chmod(0o755)
    return [name for name, _ in found]


def write_model_to_try(folder: Path) -> None:
    """Run the block of environments.md that writes a template, questions and a configuration."""
    (block,) = re.findall(r"```bash\n(cat > .*?)```", (DOCS / "environments.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-c", block], cwd=folder, check=True)


@contextmanager
def serve_questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the service of agents.md answer two questions twice each, and two of its own before and after them, once the
    run listens. Gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setenv("PODIUM_TOKEN", "token")
    monkeypatch.setenv("PODIUM_URL", f"http://127.0.0.1:{port}")
    answer = runpy.run_path("shop.py")["answer"]

    def serve() -> None:
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", int(port))):
                    break
            time.sleep(0.1)
        questions = [json.loads(row) for row in Path("questions.jsonl").read_text().splitlines()][:2]
        for question in questions * 4:
            assert answer(question["prompt"], question["answer"])

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        yield port
        served.result()


def price(name: str) -> int:
    """Look a price up."""
    return {"bolt": 3}[name]


def test_the_tools_of_the_page_answer_as_printed(tmp_path: Path) -> None:
    assert "tools.py" in files_of("environments.md", tmp_path)
    done = run_python(tmp_path / "tools.py")
    assert done.stdout in (DOCS / "environments.md").read_text()


@pytest.mark.everyday("environments.md-review.py:play")
@pytest.mark.parametrize(
    ("page", "name"),
    [
        pytest.param("environments.md", "blocking.py:play", marks=pytest.mark.exhaustive),
        ("environments.md", "review.py:play"),
        ("agents.md", "shell_agent.py:play"),
        pytest.param("agents.md", "claude_agent.py:play", marks=pytest.mark.exhaustive),
        pytest.param("coming-from-trl.md", "world.py:play", marks=pytest.mark.exhaustive),
        pytest.param("coming-from-verifiers.md", "ported.py:play", marks=pytest.mark.exhaustive),
    ],
)
def test_an_environment_of_the_pages_is_trained_in(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("shell_agent"):
        done = subprocess.run(["sh", "-c", "command -v jq curl"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("jq and curl are not both installed")
    if name.startswith("claude_agent"):
        pytest.importorskip("anthropic")
    files_of(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    tokenizer_of(FAMILIES[0]).save_pretrained(tmp_path / "tokenizer")
    shape = {**MODEL["config"], "max_position_embeddings": 2048}
    config = tiny(
        GRPOConfig,
        tmp_path,
        model={"config": shape, "tokenizer": str(tmp_path / "tokenizer")},
        environment={"name": name},
        run={"steps": 1},
        batch={"prompts": 2},
        eval={"items": 0},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert row[metrics.SESSIONS_FAILED] == 0
    assert row[metrics.MISMATCH_MAX] < 1e-5


@pytest.mark.exhaustive
def test_the_commands_of_the_pages_run_in_a_directory_with_the_files_of_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one step of few sessions. PATH has this Python first, by which an example starts an MCP server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    write_model_to_try(tmp_path)
    for page, needed in (("environments.md", "mcp"), ("agents.md", "openai")):
        pytest.importorskip(needed)
        files_of(page, tmp_path)
        lines = re.findall(r"podium (train grpo --config run.yaml [^`\n]*)", (DOCS / page).read_text())
        assert lines
        for number, line in enumerate(lines):
            name = f"{page}-{number}"
            held_out = ["--eval.items", "2"] if "environment.name service" in line else []
            less = ["--run.name", name, "--run.steps", "1", "--batch.prompts", "2", "--sampling.n", "2"]
            with serve_questions(monkeypatch) if "environment.name service" in line else nullcontext("8900") as port:
                arguments = shlex.split(line.replace("8900", port))
                assert main([*arguments, *less, *held_out, "--backend", "inline"]) == 0, line
            (row,) = metrics_rows(tmp_path / "runs" / name)
            assert row[metrics.SESSIONS_FAILED] == 0, line


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_model_of_the_page_learns_the_prices_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of the page's steps it learns half of them."""
    monkeypatch.chdir(tmp_path)
    write_model_to_try(tmp_path)
    files_of("environments.md", tmp_path)
    line = "train grpo --config run.yaml --environment.name lookup.py:play"
    assert f"\npodium {line}\n" in (DOCS / "environments.md").read_text()
    assert main([*line.split(), "--run.name", "prices", "--run.steps", "20", "--backend", "inline"]) == 0
    rewards = [row[metrics.REWARD_MEAN] for row in metrics_rows(tmp_path / "runs" / "prices")]
    assert rewards[0] < 0.1 < 0.4 < max(rewards[-3:])


def test_the_template_of_the_page_writes_calls_of_tools_which_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model_to_try(tmp_path)
    alphabet = yaml.safe_load(Path("run.yaml").read_text())["model"]["tokenizer"].removeprefix("chars:")
    tokenizer = char_tokenizer(alphabet, chat_template=Path("chat.jinja").read_text())
    written = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    tools = Toolbox([price]).schemas
    asked = [{"role": "user", "content": "What does a bolt cost?"}]
    prompt = written.prompt(asked, tools)
    assert "Look a price up." in tokenizer.decode(prompt)
    sampled = tokenizer.encode('<tool_call>{"name": "price", "arguments": {"name": "bolt"}}</tool_call><eos>')
    (call,) = written.parse(prompt, sampled, tools).tool_calls
    assert (call.name, call.arguments) == ("price", '{"name": "bolt"}')
    said = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    ]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    (end,) = tokenizer.encode("<eos>")
    ids = written.bridge(prompt, sampled, [*asked, said], [result], tools, ends=[end])
    assert ids is not None
    assert str(tokenizer.decode(ids)).endswith("</tool_call><eos>\n<tool>3<eos>\n<assistant>")
