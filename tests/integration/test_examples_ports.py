"""The worked ports of docs/coming-from-*.md run as their first lines say. Each checks its own results: it ends with an
error where they are wrong."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


RAY = (pytest.mark.ray, pytest.mark.slow)


def run(name: str, backend: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    warnings = "default" if backend == "ray" else "error"  # those of Ray itself are not ours to mend
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_python("-W", warnings, EXAMPLES / name, "--backend", backend, cwd=cwd, env=environment)


@pytest.mark.parametrize(("backend", "ranks"), [("local", 6), ("inline", 1), pytest.param("ray", 6, marks=RAY)])
def test_port_from_verl(tmp_path: Path, backend: str, ranks: int) -> None:
    done = run("port_from_verl.py", backend, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"ranks: (\d+); mean reward in 12 steps: ([\d.]+) -> ([\d.]+), as one .*\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) == ranks
    assert float(found[2]) < 0.2 < 0.8 < float(found[3])


def test_port_from_verl_checks_what_the_ranks_computed(tmp_path: Path) -> None:
    """A rank that leaves its data-parallel neighbours out learns something else, and the script says so."""
    text = (EXAMPLES / "port_from_verl.py").read_text()
    correct = 'self.actor.sum(gradient_VC, "dp")'
    assert text.count(correct) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(correct, "gradient_VC"))
    done = run(str(broken), "local", tmp_path)
    assert done.returncode == 1
    assert "AssertionError: the layout changed what was" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local"])
def test_port_from_trl(tmp_path: Path, backend: str) -> None:
    done = run("port_from_trl.py", backend, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"reward ([\d.]+) -> ([\d.]+) in 50 steps\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 0.4 < 0.7 < float(found[2])


@pytest.mark.parametrize(
    "backend",
    [pytest.param("local", marks=pytest.mark.exhaustive), "inline", pytest.param("ray", marks=RAY)],
)
def test_port_from_areal(tmp_path: Path, backend: str) -> None:
    done = run("port_from_areal.py", backend, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"reward ([\d.]+) -> ([\d.]+) in 30 steps, ([\d.]+) nats .*\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 0.3 < 0.8 < float(found[2])


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=RAY)])
def test_two_groups_share_a_channel(tmp_path: Path, backend: str) -> None:
    done = run("two_groups.py", backend, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step}: 131072 values from 2 actors, norm 1.000" for step in range(2)]


@pytest.mark.parametrize("backend", ["local", "inline", pytest.param("ray", marks=pytest.mark.ray)])
def test_workers_declare_the_layout_of_their_framework(tmp_path: Path, backend: str) -> None:
    done = run("framework_layout.py", backend, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mesh: Mesh(tp=1, cp=1, dp=2, pp=2) in rank order: (0, 0, 1, 1)",
        "rows: [1, 2] padded at the call: [2, 2]",
        f"best: high inherited: {'nothing' if backend == 'inline' else 'tp-cp-dp-pp'}",
    ]


def test_two_groups_need_collectives(tmp_path: Path) -> None:
    done = run("two_groups.py", "inline", tmp_path)
    assert done.returncode == 2
    assert "no collectives over several ranks; use local" in done.stderr
