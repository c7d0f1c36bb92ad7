"""Where a run's ranks go."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import podium
from podium import Worker, endpoint
from podium.errors import ConfigError, PlacementError
from podium.telemetry import Note, WorkerStarted, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from podium.trainer.roles import bind_roles, start_roles
from tests.integration.training import tiny


def test_a_run_is_spread_over_nodes(tmp_path: Path) -> None:
    """Policy and generator take all cores of a node each, in a debugger's pretended cluster."""
    events: list[object] = []
    with podium.connect("inline", nodes=2) as cluster:
        cores = int(cluster.nodes[0].resources["cpu"])
        config = tiny(GRPOConfig, tmp_path, placement={"layout": "split", "cpus": cores}, run={"steps": 1})
        unsubscribe = subscribe(events.append)
        try:
            PPOTrainer(config, cluster=cluster, show=False).fit()
        finally:
            unsubscribe()
        assert len(cluster.pool([1, 1], cpus=cores)) == 2  # all of it was given back
    started = {event.role: event.node for event in events if isinstance(event, WorkerStarted)}
    assert started.keys() == {"policy+estimator", "generator"}
    assert set(started.values()) == {"node-0", "node-1"}
    places = {name: f"1 process on {started[name]} cpu" for name in started}
    line = f"placement  policy, estimator: {places['policy+estimator']}; generator: {places['generator']}"
    assert line in {event.text for event in events if isinstance(event, Note)}
    assert line in (tmp_path / "runs" / "run" / "logs" / "controller.log").read_text()


def test_generators_that_share_processes_with_another_role_are_not_restarted_alone(tmp_path: Path) -> None:
    for others, apart in ((["reference"], False), ([], True)):
        pools = {
            "train": {"roles": ["policy", *({"reference"} - {*others})]},
            "draw": {"roles": ["generator", *others]},
        }
        config = tiny(GRPOConfig, tmp_path, placement={"pools": pools}, algorithm={"kl_in": "loss"})
        with podium.connect("inline") as cluster, start_roles(cluster, config) as roles:
            assert roles.generators_are_apart is apart


def test_a_class_that_lacks_an_endpoint_of_this_schedule_or_placement_is_refused_before_it_starts(
    tmp_path: Path,
) -> None:
    class Own(Worker):
        @endpoint
        def generate(self) -> None: ...

    split = tiny(GRPOConfig, tmp_path, placement={"layout": "split"}, run={"schedule": "asynchronous"})
    for role, says in (
        ("estimator", r"'estimator'\]: Own has no endpoint 'keep', which copies .* podium\.workers\.Estimator"),
        ("generator", r"'generator'\]: Own has no endpoint 'generate_beside', with which run\.schedule = asynchronous"),
    ):
        with pytest.raises(ConfigError, match=says):
            PPOTrainer(split, cluster="inline", workers={role: Own}, show=False).fit()
        assert bind_roles(tiny(GRPOConfig, tmp_path), {role: Own.bind()})[role].cls is Own
    resting = tiny(GRPOConfig, tmp_path, parallel={"offload": "optimizer"})
    for role in ("policy", "generator"):
        with pytest.raises(
            ConfigError, match=rf"{role}'\]: Own has no endpoint 'rest', with which parallel\.offload = opt"
        ):
            bind_roles(resting, {role: Own})


def test_a_trainer_can_train_again(tmp_path: Path) -> None:
    trainer = PPOTrainer(tiny(GRPOConfig, tmp_path, run={"name": "", "steps": 1}), cluster="inline", show=False)
    first, second = trainer.fit(), trainer.fit()
    assert (first.finished, second.finished) == (True, True)
    assert second.prompts == {"trained": 4}
    assert len([*(tmp_path / "runs").iterdir()]) == 2


def test_chosen_calls_leave_a_trace_in_the_run(tmp_path: Path) -> None:
    run = {"steps": 2, "name": "recorded", "profile": ["policy.update"]}
    PPOTrainer(tiny(GRPOConfig, tmp_path, run=run), cluster="inline", show=False).fit()
    (trace,) = tmp_path.rglob("profile/*")
    assert (trace.name, trace.parent.parent.name) == ("policy-0-update-1.json", "recorded")
    for wrong, says in (
        ("critic.update", r"run\.profile = critic\.update: expected ROLE\.ENDPOINT, and the roles are policy, "),
        ("update", r"run\.profile = update: expected ROLE\.ENDPOINT"),
        ("policy.updat", r"run\.profile = policy\.updat: no endpoint of Policy; did you mean update\?"),
    ):
        config = tiny(GRPOConfig, tmp_path, run={"steps": 1, "profile": [wrong]})
        with pytest.raises(ConfigError, match=says):
            PPOTrainer(config, cluster="inline", show=False).fit()


def test_a_run_waits_for_cores_that_others_hold(tmp_path: Path) -> None:
    with podium.connect("inline") as cluster:
        cores = int(cluster.nodes[0].resources["cpu"])
        held = cluster.pool([1], cpus=cores)
        placement = {"cpus": cores, "wait_s": 0.0}
        with pytest.raises(PlacementError, match=f"placement of 1 rank .*asked for 1 slots? of {cores} cpu"):
            PPOTrainer(tiny(GRPOConfig, tmp_path, placement=placement), cluster=cluster, show=False).fit()
        given_back = threading.Timer(0.5, cluster.release, [held])
        given_back.start()
        config = tiny(GRPOConfig, tmp_path, placement={**placement, "wait_s": 60}, run={"steps": 1})
        assert PPOTrainer(config, cluster=cluster, show=False).fit().steps == 1
        given_back.join()


def test_two_ranks_fit_beside_the_scripts_own_pools(tmp_path: Path) -> None:
    """Three nodes with a pool of the script's on each of them: a core is left on each, which is enough for a rank."""
    with podium.connect("local", nodes=3) as cluster:
        cores = int(cluster.nodes[0].resources["cpu"])
        cluster.pool([1, 1, 1], cpus=cores - 1)
        config = tiny(
            SFTConfig, tmp_path, placement={"ranks": 2, "cpus": 1}, run={"steps": 1}, eval={"items": 0},
            save={"model": False},
        )  # fmt: skip
        assert SFTTrainer(config, cluster=cluster, show=False).fit().steps == 1
        assert len(cluster.pool([1, 1, 1], cpus=1)) == 3  # all of it was given back
