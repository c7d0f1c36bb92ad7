"""The code of docs/environments.md and docs/agents.md does what the pages say, in real runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.environments.resolve import resolve_environment
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of

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


def test_the_tools_of_the_page_answer_as_printed(tmp_path: Path) -> None:
    assert "tools.py" in files_of("environments.md", tmp_path)
    done = subprocess.run([sys.executable, str(tmp_path / "tools.py")], capture_output=True, text=True, check=True)
    assert done.stdout in (DOCS / "environments.md").read_text()


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("environments.md", "lookup.py:play"),
        ("environments.md", "guess.py:Guess"),
        ("agents.md", "my_agent.py:play"),
        ("agents.md", "shell_agent.py:play"),
        ("coming-from-trl.md", "world.py:play"),
        ("coming-from-verifiers.md", "ported.py:play"),
    ],
)
def test_an_environment_of_the_pages_is_trained_in(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("shell_agent"):
        done = subprocess.run(["sh", "-c", "command -v jq curl"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("jq and curl are not both installed")
    if name.startswith("my_agent"):
        pytest.importorskip("openai")
    files_of(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    tokenizer_of(FAMILIES[0]).save_pretrained(tmp_path / "tokenizer")
    shape = {**MODEL["config"], "max_position_embeddings": 2048}
    own_tasks = name.endswith("Guess")
    config = tiny(
        GRPOConfig,
        tmp_path,
        model={"config": shape, "tokenizer": str(tmp_path / "tokenizer")},
        environment={"name": name},
        run={"steps": 1},
        batch={"prompts": 2},
        eval={"items": 0},
        **({"data": {"train": ""}} if own_tasks else {}),
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert row[metrics.SESSIONS_FAILED] == 0
    assert row[metrics.MISMATCH_MAX] < 1e-5


def test_what_the_pages_show_of_mcp_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_of("environments.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve_environment(EnvironmentConfig(name="parts.py:play")).tasks is None
