"""The same training, unchanged, wherever its workers run: on processes of this machine, and on two nodes of Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

import podium
from podium import Cluster
from podium.cli import main
from podium.runs.ledger import read_ledger
from podium.telemetry import WorkerStarted, subscribe
from podium.trainer import PRELOAD, GRPOConfig, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer, config_to_yaml
from tests.integration.processes import all_gone, wait_for
from tests.integration.training import losses, metrics_rows, tiny

CONTROLLER = "import sys; from podium.cli import main; sys.exit(main())"


class Place(NamedTuple):
    """A backend by name and options, and a cluster of it that is connected already."""

    backend: str
    options: dict[str, str]
    cluster: Cluster

    @property
    def words(self) -> list[str]:
        """What says so on the command line."""
        given = [word for name, value in self.options.items() for word in (f"--backend.{name}", value)]
        return ["--backend", self.backend, *given]


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def place(request: pytest.FixtureRequest, preloaded: Cluster) -> Iterator[Place]:
    """Local, or a running Ray cluster of two nodes with one core each."""
    if request.param == "local":
        yield Place("local", {}, preloaded)
        return
    from tests.integration.ray_nodes import add_node, ray_nodes

    with ray_nodes(num_cpus=1) as nodes:
        add_node(nodes, "second", num_cpus=1)
        with podium.connect("ray", address=nodes.address, preload=PRELOAD) as cluster:
            yield Place("ray", {"address": str(nodes.address)}, cluster)


def train(config: PPOConfig | SFTConfig, cluster: Cluster | str = "inline") -> Path:
    if isinstance(config, SFTConfig):
        SFTTrainer(config, cluster=cluster, show=False).fit()
    else:
        PPOTrainer(config, cluster=cluster, show=False).fit()
    return Path(config.run.dir) / config.run.name


def timeless(run: Path) -> list[dict[str, Any]]:
    """Every number of the run but those of the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time") and "per_s" not in name}
        for row in metrics_rows(run)
    ]


def test_one_rank_gives_the_same_bits_as_inline(place: Place, tmp_path: Path) -> None:
    """Not only the loss: what was sampled, its advantages, the norms of the gradients."""
    inline = train(tiny(GRPOConfig, tmp_path, run={"name": "inline", "steps": 3}))
    there = train(tiny(GRPOConfig, tmp_path, run={"name": "there", "steps": 3}), place.cluster)
    assert timeless(there) == timeless(inline)
    assert len(timeless(there)) == 3


def test_ppo_split_and_resumed_gives_the_same_bits_as_inline_in_one_go(place: Place, tmp_path: Path) -> None:
    """Policy, critic and reference on one process, the generator on another; weights go over after each step."""
    sections: dict[str, Any] = {
        "batch": {"prompts": 8},
        "algorithm": {"kl_coef": 0.1, "kl_target": 0.01},
        "critic": {"lr": 1e-2},
    }
    whole = train(tiny(PPOConfig, tmp_path, run={"name": "whole", "steps": 4}, **sections))
    sections["placement"] = {"layout": "split", "cpus": 1}
    parts = train(tiny(PPOConfig, tmp_path, run={"name": "parts", "steps": 2}, **sections), place.cluster)
    again = {"name": "parts", "steps": 4, "resume": str(parts)}
    train(tiny(PPOConfig, tmp_path, run=again, **sections), place.cluster)
    assert timeless(parts) == timeless(whole)
    versions = [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((parts / "completions").iterdir())]
    assert versions == [{0}, {1}, {2}, {3}]
    place.cluster.release(place.cluster.pool([1] * len(place.cluster.nodes), cpus=1))  # all was given back


@pytest.mark.parametrize(("recipe", "strategy"), [(GRPOConfig, "fsdp2"), (SFTConfig, "replicate")])
def test_two_ranks_give_the_loss_of_one(
    place: Place, tmp_path: Path, recipe: type[PPOConfig | SFTConfig], strategy: str
) -> None:
    """On Ray on two nodes: neither has the cores of both."""
    one = train(tiny(recipe, tmp_path, run={"name": "one", "steps": 3}))
    placed: list[str] = []
    unsubscribe = subscribe(lambda event: placed.append(event.node) if isinstance(event, WorkerStarted) else None)
    sections = {"placement": {"ranks": 2, "cpus": 1}, "parallel": {"strategy": strategy}}
    try:
        two = train(tiny(recipe, tmp_path, run={"name": "two", "steps": 3}, **sections), place.cluster)
    finally:
        unsubscribe()
    assert len(set(placed)) == len(place.cluster.nodes)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert [row["accuracy"] for row in metrics_rows(two, "eval")] == [
        row["accuracy"] for row in metrics_rows(one, "eval")
    ]


def test_the_commands(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(SFTConfig, tmp_path, save={"every": 1})
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    assert main(["train", "sft", "--config", str(tmp_path / "run.yaml"), *place.words]) == 0
    assert "held-out accuracy" in capsys.readouterr().out
    run = str(tmp_path / "runs" / "run")
    assert main(["eval", run, *place.words]) == 0
    assert "of 4; 95% interval" in capsys.readouterr().out
    assert main(["sample", run, "--prompt", "12=", "--sampling.n", "2", *place.words]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


class Run:
    """``podium train sft`` with a checkpoint after every step, in a session of its own as on a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.path = folder / "runs" / "run"
        command = [sys.executable, "-c", CONTROLLER, "train", "sft", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def wait_for_step(self, step: int) -> None:
        """Until the checkpoint of ``step`` or a later one is there."""
        folder = self.path / "checkpoints"
        assert wait_for(lambda: self.ended or self.latest(folder) >= step, 60), f"no step {step}"
        assert not self.ended, f"ended before step {step}"

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def workers(self) -> list[int]:
        """Process ids of the worker processes, from the trace."""
        lines = (self.path / "trace.json").read_text().splitlines()
        return [json.loads(line.rstrip(","))["args"]["pid"] for line in lines if '"name":"started"' in line]

    @staticmethod
    def latest(folder: Path) -> int:
        state = folder / "latest" / "trainer.json"
        return int(json.loads(state.read_text())["step"]) if state.exists() else 0

    def end(self) -> str:
        """What it printed, once it ended by itself."""
        try:
            return self.process.communicate(timeout=200)[0]
        finally:
            self.process.kill()


def long_run(folder: Path, steps: int) -> list[str]:
    """Arguments of a run of so many steps, each of which is saved."""
    folder.mkdir(exist_ok=True)
    config = tiny(SFTConfig, folder, run={"steps": steps}, eval={"items": 0}, save={"every": 1, "model": False})
    (folder / "run.yaml").write_text(config_to_yaml(config))
    return ["--config", str(folder / "run.yaml"), "--placement.cpus", "1"]


def test_killed_at_any_moment_a_run_goes_on_as_if_it_had_not_been(place: Place, tmp_path: Path) -> None:
    """SIGKILL, then SIGTERM, then to the end: every number is that of a run in one go."""
    first = Run(tmp_path, *long_run(tmp_path, 100_000), *place.words)
    try:
        first.wait_for_step(2)
        assert wait_for(lambda: bool(first.workers), 10)
    finally:
        first.process.kill()
        first.process.communicate()
    assert not all_gone(first.workers, 10.0)
    second = Run(tmp_path, "--resume", str(first.path), *place.words)
    try:
        second.wait_for_step(Run.latest(first.path / "checkpoints") + 2)
        second.process.send_signal(signal.SIGTERM)
    finally:
        out = second.end()
    assert second.process.returncode == 0
    done = Run.latest(first.path / "checkpoints")
    words = " ".join(place.words) if place.backend != "local" else ""
    assert f"stopped after step {done}; podium train sft --resume {first.path} {words}".strip() in out
    rows = timeless(first.path)
    assert [row["step"] for row in rows] == list(range(1, done + 1))
    assert read_ledger(first.path / "ledger.jsonl").counts() == {"trained": 8 * done}  # each example once
    (tmp_path / "whole").mkdir()
    whole = tiny(
        SFTConfig, tmp_path / "whole", run={"steps": done}, eval={"items": 0}, save={"model": False},
        data={"train": str(tmp_path / "copy.jsonl")},
    )  # fmt: skip
    assert timeless(train(whole)) == rows


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_ctrl_c_on_the_terminal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path, backend: str) -> None:
    """The terminal sends SIGINT to the whole process group: controller, workers, grading processes; and all of Ray,
    where the script's own cluster is one."""
    run = Run(tmp_path, *long_run(tmp_path, 100_000), "--backend", backend)
    try:
        run.wait_for_step(1)
        os.killpg(run.process.pid, signal.SIGINT)
    finally:
        out = run.end()
    assert run.process.returncode == 0
    step = Run.latest(run.path / "checkpoints")
    assert step == metrics_rows(run.path)[-1]["step"]
    there = "" if backend == "local" else f" --backend {backend}"
    assert f"stopped after step {step}; podium train sft --resume {run.path}{there} goes on" in out
