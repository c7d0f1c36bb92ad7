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
from podium.trainer import PRELOAD, PPOConfig, SFTConfig, config_to_yaml
from tests.integration.finished_runs import grpo_config, sft_config
from tests.integration.processes import all_gone, wait_for
from tests.integration.training import losses, metrics_rows, timeless, tiny, train
from tests.warm_python import WarmPopen

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


def test_one_rank_gives_the_same_bits_as_inline(place: Place, finished_grpo: Path, tmp_path: Path) -> None:
    """Not only the loss: what was sampled, its advantages, the norms of the gradients."""
    run = train(grpo_config(tmp_path), place.cluster)
    assert timeless(run) == timeless(finished_grpo / "runs" / "run")
    assert len(timeless(run)) == 3


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
    assert metrics_rows(whole)[-1]["policy/kl_coef"] != 0.1, "the coefficient moves, and is a part of the checkpoint"
    versions = [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((parts / "completions").iterdir())]
    assert versions == [{0}, {1}, {2}, {3}]
    place.cluster.release(place.cluster.pool([1] * len(place.cluster.nodes), cpus=1))  # all was given back


@pytest.mark.parametrize(("recipe", "strategy"), [("grpo", "fsdp2"), ("sft", "replicate")])
def test_two_ranks_give_the_loss_of_one(
    place: Place, finished_grpo: Path, finished_sft: Path, tmp_path: Path, recipe: str, strategy: str
) -> None:
    """On Ray on two nodes: neither has the cores of both."""
    make_config, one = (grpo_config, finished_grpo) if recipe == "grpo" else (sft_config, finished_sft)
    nodes: list[str] = []
    unsubscribe = subscribe(lambda event: nodes.append(event.node) if isinstance(event, WorkerStarted) else None)
    sections = {"placement": {"ranks": 2, "cpus": 1}, "parallel": {"strategy": strategy}}
    try:
        two = train(make_config(tmp_path, **sections), place.cluster)
    finally:
        unsubscribe()
    assert len(set(nodes)) == len(place.cluster.nodes)
    assert losses(two) == pytest.approx(losses(one / "runs" / "run"), abs=1e-5)
    figure = {"grpo": "reward_mean", "sft": "loss"}[recipe]
    assert [row[figure] for row in metrics_rows(two, "eval")] == pytest.approx(
        [row[figure] for row in metrics_rows(one / "runs" / "run", "eval")], abs=1e-5
    )


@pytest.mark.parametrize("command", ["eval", pytest.param("sample", marks=pytest.mark.exhaustive)])
def test_a_finished_run_is_evaluated_and_sampled(
    place: Place, finished_sft: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = {"eval": [], "sample": ["--prompt", "12=", "--sampling.n", "2"]}[command]
    assert main([command, str(finished_sft / "runs" / "run"), *words, *place.words]) == 0
    out = capsys.readouterr().out
    assert "(4 items; 95% interval" in out if command == "eval" else len(out.splitlines()) == 4


class Run:
    """``podium train sft`` with a checkpoint after every step, in a session of its own as on a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.path = folder / "runs" / "run"
        command = [sys.executable, "-c", CONTROLLER, "train", "sft", *arguments]
        self.process = WarmPopen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

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


@pytest.mark.parametrize("end", ["Ctrl-C", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_a_run_goes_on_as_if_it_had_not_been(place: Place, tmp_path: Path, end: str) -> None:
    """SIGKILL, then a signal that asks for an end: every number is that of a run in one go.

    By Ctrl-C the terminal sends SIGINT to the whole process group: controller and grading processes.
    """
    first = Run(tmp_path, *long_run(tmp_path, 100_000), *place.words)
    try:
        first.wait_for_step(2)
        assert wait_for(lambda: bool(first.workers), 60)
    finally:
        first.process.kill()
        first.process.communicate()
    assert not all_gone(first.workers, 60.0)
    second = Run(tmp_path, "--resume", str(first.path), *place.words)
    try:
        second.wait_for_step(Run.latest(first.path / "checkpoints") + 1)
        if end == "Ctrl-C":
            os.killpg(second.process.pid, signal.SIGINT)
        else:
            second.process.send_signal(signal.SIGTERM)
    finally:
        out = second.end()
    assert second.process.returncode == 0
    done = Run.latest(first.path / "checkpoints")
    words = " ".join(place.words) if place.backend != "local" else ""
    assert f"stopped after step {done}; to continue: podium train sft --resume {first.path} {words}".strip() in out
    rows = timeless(first.path)
    assert [row["step"] for row in rows] == list(range(1, done + 1))
    assert read_ledger(first.path / "ledger.jsonl").counts() == {"trained": 8 * done}  # each example once
    (tmp_path / "whole").mkdir()
    whole = tiny(
        SFTConfig, tmp_path / "whole", run={"steps": done}, eval={"items": 0}, save={"model": False},
        data={"train": str(tmp_path / "copy.jsonl")},
    )  # fmt: skip
    assert timeless(train(whole)) == rows


@pytest.mark.ray
def test_ctrl_c_reaches_the_runs_own_cluster_of_ray_and_the_step_is_finished_and_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, *long_run(tmp_path, 100_000), "--backend", "ray")
    try:
        run.wait_for_step(1)
        os.killpg(run.process.pid, signal.SIGINT)
    finally:
        out = run.end()
    assert run.process.returncode == 0
    step = Run.latest(run.path / "checkpoints")
    assert step == metrics_rows(run.path)[-1]["step"]
    assert f"stopped after step {step}; to continue: podium train sft --resume {run.path} --backend ray\n" in out
