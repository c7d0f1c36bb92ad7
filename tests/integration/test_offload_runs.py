"""Runs whose roles leave their devices while they are idle are the same runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from podium.data import Batch
from podium.rollout.sampling import SamplingParams
from podium.runtime import Cluster, concat, endpoint, nothing, shard
from podium.trainer import PPOConfig, PPOTrainer
from podium.workers import Critic, Generator, Policy
from tests.integration.training import timeless, tiny

SECTIONS: dict[str, dict[str, Any]] = {
    "algorithm": {"kl_coef": 0.1},
    "critic": {"lr": 1e-2},
    "save": {"every": 1},
    "run": {"steps": 3},
}
seen: list[str] = []


def note(who: str, model: nn.Module) -> None:
    there = any(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    seen.append(f"{who} {'there' if there else 'away'}")


class WatchedPolicy(Policy):
    @endpoint(collect=nothing())
    def rest(self, weights: bool = True) -> None:
        super().rest(weights)
        note(f"policy rests{'' if weights else ' but for its weights'}:", self.engine.model)


class WatchedCritic(Critic):
    @endpoint(collect=nothing())
    def rest(self, weights: bool = True) -> None:
        super().rest(weights)
        note("critic rests:", self.engine.model)


class WatchedGenerator(Generator):
    @endpoint(collect=nothing())
    def rest(self) -> None:
        super().rest()
        note("generator rests:", getattr(self._engine, "model"))  # noqa: B009 - not all engines have one

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        if self._policy is not None:
            note("policy while completions are drawn:", self._policy.engine.model)
        return super().generate(prompts, sampling)


def run(folder: Path, name: str, cluster: Cluster | str = "inline", **sections: Any) -> list[dict[str, Any]]:
    seen.clear()
    together = {**SECTIONS, **sections, "run": {**SECTIONS["run"], "name": name, **sections.get("run", {})}}
    config = tiny(PPOConfig, folder, **together)
    workers = {"policy": WatchedPolicy, "critic": WatchedCritic, "generator": WatchedGenerator}
    if cluster == "inline":
        PPOTrainer(config, cluster=cluster, workers=workers, show=False).fit()
    else:
        PPOTrainer(config, cluster=cluster, show=False).fit()
    return timeless(folder / "runs" / name)


@pytest.mark.parametrize(
    "dtype", [None, pytest.param("bfloat16", marks=pytest.mark.exhaustive)], ids=["shared", "copied"]
)
def test_a_run_with_rests_is_the_same_run(tmp_path: Path, dtype: str | None) -> None:
    engine = {"engine": {"dtype": dtype}, "algorithm": {**SECTIONS["algorithm"], "max_mismatch": None}}
    plain = run(tmp_path, "plain", **engine)
    assert not any("rests" in what for what in seen)
    assert run(tmp_path, "all", parallel={"offload": "all"}, **engine) == plain
    assert seen.count("critic rests: away") == 3
    assert seen.count("policy rests but for its weights: there") == 3
    # A generator that reads the policy's own weights keeps them; one with a copy lets go of it while the policy learns.
    away = "away" if dtype else "there"
    assert seen.count(f"policy rests: {away}") == 4
    assert seen.count(f"generator rests: {away}") == 3
    assert f"policy while completions are drawn: {away}" in seen[-8:]


@pytest.mark.exhaustive
def test_a_run_over_processes_with_rests_is_the_same_run(tmp_path: Path, preloaded: Cluster) -> None:
    """The generator in processes of its own is sent what rested, and a checkpoint of what rested is resumed."""
    plain = run(tmp_path, "plain")
    split = {"placement": {"layout": "split"}, "parallel": {"offload": "all"}}
    run(tmp_path, "all", preloaded, **split, run={"steps": 2})
    resumed = {"steps": 3, "resume": str(tmp_path / "runs" / "all")}
    assert run(tmp_path, "all", preloaded, **split, run=resumed) == plain
