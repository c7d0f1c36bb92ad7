"""Every example runs as its first lines say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from podium.trainer import GRPOConfig, PPOTrainer, load_config
from tests.integration.training import metrics_rows, tiny
from tests.warm_python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python(*arguments, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "ranks"), [("local", 4), ("inline", 1), pytest.param("ray", 4, marks=pytest.mark.ray)]
)
def test_custom_worker(tmp_path: Path, backend: str, ranks: int) -> None:
    lines = run(str(EXAMPLES / "custom_worker.py"), "--backend", backend, cwd=tmp_path).splitlines()
    assert lines[0] == f"ranks: {ranks}"
    scores = json.loads(lines[1])
    assert sum(scores) == pytest.approx(0, abs=1e-2)
    assert scores == sorted(scores)


def test_the_loop_of_grpo_runs_and_draws_its_curve(tmp_path: Path) -> None:
    lines = run(str(EXAMPLES / "grpo_loop.py"), "4", cwd=tmp_path).splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [["step", str(step)] for step in (1, 2, 3, 4)]
    rewards = [float(line.split()[3]) for line in lines[:4]]
    assert [float(line.split()[-1]) for line in lines[4:]] == pytest.approx(rewards, abs=0.006)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_loop_of_grpo_learns_to_copy(tmp_path: Path) -> None:
    curve = run(str(EXAMPLES / "grpo_loop.py"), cwd=tmp_path).splitlines()[160:]
    shares = [float(line.split()[-1]) for line in curve]
    assert len(shares) == 16
    assert shares[0] < 0.15
    assert shares[-1] > 0.9


def test_custom_reward_advantage_and_loss_in_a_run(tmp_path: Path) -> None:
    assert "1.00  correct" in run(str(EXAMPLES / "custom_reward.py"), cwd=tmp_path)
    assert run(str(EXAMPLES / "custom_advantage.py"), cwd=tmp_path).startswith("[0.0, 0.5, 0.0, 0.0")
    assert run(str(EXAMPLES / "custom_loss.py"), cwd=tmp_path) == "[1.0, 2.56, -0.5]\n"
    config = tiny(
        GRPOConfig,
        tmp_path,
        reward={"name": f"{EXAMPLES}/custom_reward.py:digits_in_order"},
        algorithm={
            "advantage": f"{EXAMPLES}/custom_advantage.py:best_of_group",
            "loss": f"{EXAMPLES}/custom_loss.py:cispo",
        },
        eval={"items": 0},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    assert len(metrics_rows(tmp_path / "runs" / "run")) == 2


def test_gsm8k_configuration_is_valid() -> None:
    config = load_config(GRPOConfig, EXAMPLES / "gsm8k_grpo.yaml", ["--data.train", "train.jsonl"])
    assert (config.rows, config.algorithm.updates, config.reward.name) == (256, 2, "gsm8k")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.ray)])
def test_smoke_learns_to_copy_from_nothing(tmp_path: Path, backend: str) -> None:
    out = run(
        str(EXAMPLES / "quickstart.py"), "--smoke", "--backend", backend, "--out", str(tmp_path / "out"), cwd=tmp_path
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["before"]["accuracy"] < 0.05
    assert summary["after"]["accuracy"] > 0.9
    assert "held-out accuracy" in out
    assert (tmp_path / "out" / "curve.png").stat().st_size > 10_000
    command = out.partition("try it")[2].split()[0]  # the environment of `make quickstart` is on no path
    assert shutil.which("podium") if command == "podium" else (tmp_path / command).exists()
