"""The plan of a dry run: what each process holds, and the memory that it takes for that."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.errors import ConfigError, DataError
from podium.models import ModelConfig, load_model
from podium.trainer import GRPOConfig, PPOConfig, SFTConfig
from podium.trainer.roles import bind_roles
from podium_dryrun import describe_memory, describe_plan, memory, pass_memory
from podium_dryrun.memory import Amounts, ModelSize, Row, memory_gib, model_size
from podium_dryrun.pass_memory import PassMemory
from tests.integration.training import MODEL, tiny

SIZE = ModelSize(parameters=2**28, trained=2**28, layers=1, hidden=1, key_value_width=1, vocabulary=1)


def test_processes_hold_what_the_placement_puts_there(tmp_path: Path) -> None:
    kl = {"kl_in": "loss"}
    together = tiny(GRPOConfig, tmp_path, placement={"ranks": 2}, algorithm=kl)
    assert together.processes == [(("policy", "reference", "estimator", "generator"), 2)]
    apart = tiny(GRPOConfig, tmp_path, placement={"layout": "split", "ranks": 2, "generator_ranks": 3}, algorithm=kl)
    assert apart.processes == [(("policy", "reference", "estimator"), 2), (("generator",), 3)]
    no_generator = tiny(SFTConfig, tmp_path, placement={"layout": "split", "ranks": 1}, eval={"items": 0})
    assert no_generator.processes == [(("policy",), 1)]


def test_memory_is_that_of_a_processs_own_roles(tmp_path: Path) -> None:
    config = tiny(PPOConfig, tmp_path, placement={"layout": "split", "ranks": 2}, parallel={"micro_batch_tokens": 1})
    trains = memory_gib(config, SIZE, ("policy", "reference", "critic"))
    assert {name: round(gib, 3) for name, gib in trains.items()} == {
        "weights": 1.0,
        "optimizer (AdamW)": 2.0,
        "critic with optimizer": 3.0,
        "reference weights": 1.0,
        "gradients": 1.0,
        "critic's gradients": 1.0,
        "copy for a checkpoint": 3.0,  # of each rank a half of both, which is more than a pass takes
    }
    generates = memory_gib(config, SIZE, ("generator",))
    assert generates["generator's own weights"] == 1.0
    assert [*generates][:2] == ["generator's own weights", "key/value cache"]
    half = memory_gib(config, SIZE, ("critic",), critic=replace(SIZE, parameters=2**27))
    assert half == {"critic with optimizer": 1.5, "critic's gradients": 0.5, "copy for a checkpoint": 0.75}


def test_of_the_stages_the_one_counts_that_adds_most(tmp_path: Path) -> None:
    config, size = tiny(GRPOConfig, tmp_path), replace(SIZE, parameters=2**20, trained=2**20)
    roles = ("policy", "generator")
    copies = memory_gib(config, size, roles, passes={"policy": PassMemory(2**20, 0)})
    assert copies["copy for a checkpoint"] == 3 * 2**20 * 4 / 2**30
    assert "activations" not in copies
    passes = memory_gib(config, size, roles, passes={"policy": PassMemory(2**30, 2**29)})
    assert passes["activations"] == 1.0
    assert passes["temporary tensors"] == 0.5
    assert "copy for a checkpoint" not in passes
    drawn = memory_gib(config, replace(size, vocabulary=2**30), ("generator",))
    assert drawn["logits and probabilities"] == 2 * 16 * 4


def test_a_sharded_policy_has_no_gradients_while_its_only_pass_needs_activations(tmp_path: Path) -> None:
    sharded = {"placement": {"ranks": 2}, "parallel": {"strategy": "fsdp2"}}
    config, size = tiny(GRPOConfig, tmp_path, **sharded), replace(SIZE, outside=2**27, layer=2**26)
    passes = {"policy": PassMemory(2**40, 0)}
    alone = memory_gib(config, size, ("policy",), amounts=Amounts.of(config, [4] * 16), passes=passes)
    assert "gradients" not in alone
    assert alone["gathered shards"] == 1.0
    sharded["parallel"] = {"strategy": "fsdp2", "micro_batch_tokens": 8}
    config = tiny(GRPOConfig, tmp_path, **sharded)
    several = memory_gib(config, size, ("policy",), amounts=Amounts.of(config, [4] * 16), passes=passes)
    assert several["gradients"] == 0.5


def test_a_pass_that_cannot_be_counted_is_rough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(GRPOConfig, tmp_path)
    assert "\n  temporary tensors" in describe_memory(config, "local")

    def refuse(*args: Any, **options: Any) -> PassMemory:
        raise RuntimeError("which expert a token goes to depends on its values")

    monkeypatch.setattr(pass_memory, "count_pass", refuse)
    rough = describe_memory(config, "local")
    assert "\n  activations (rough) " in rough
    assert "temporary tensors" not in rough


def test_each_setting_that_a_loss_or_an_estimator_brings_is_printed_with_its_origin(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, algorithm={"loss": "gspo", "clip_high": 0.5})
    plan = " ".join(describe_plan(config, "inline").split())
    assert "algorithm clip_low = 0.0003 (default of the loss gspo: Zheng et al. 2025, GSPO, arXiv:2507.18071" in plan
    assert "clip_high = 0.5 (yours)" in plan
    assert "aggregation = sequence-mean (default of the loss gspo:" in plan
    assert "normalize_advantage = true (default of the advantage grpo:" in plan
    with_critic = " ".join(describe_plan(tiny(PPOConfig, tmp_path), "inline").split())
    assert "clip_high = 0.2 (default with a critic: Schulman et al. 2017" in with_critic
    assert "clip_low = 0.2 (default of the recipe:" in with_critic


def test_few_logits_exist_at_the_same_time(tmp_path: Path) -> None:
    size, roles = replace(SIZE, parameters=0, trained=0, layers=0, vocabulary=2**17), ("policy",)
    config = tiny(GRPOConfig, tmp_path)
    few, many = (
        memory_gib(config, size, roles, amounts=replace(Amounts.of(config, None), tokens=tokens))["activations (rough)"]
        for tokens in (256, 16384)
    )
    assert few == many == (3 * 2**25 + 2**17) * 4 / 2**30


def test_a_colocated_generator_reads_the_policys_weights_unless_they_are_sharded_adapted_or_of_another_type(
    tmp_path: Path,
) -> None:
    roles = ("policy", "generator")
    assert "generator's own weights" not in memory_gib(tiny(GRPOConfig, tmp_path), SIZE, roles)
    sharded = tiny(GRPOConfig, tmp_path, placement={"ranks": 2}, parallel={"strategy": "fsdp2"})
    assert memory_gib(sharded, SIZE, roles)["generator's own weights"] == 1.0
    assert memory_gib(sharded, SIZE, roles)["weights"] == 0.5
    adapted = tiny(GRPOConfig, tmp_path, model={"lora": {"rank": 2}})
    assert memory_gib(adapted, SIZE, roles)["generator's own weights"] == 1.0
    assert memory_gib(adapted, SIZE, ("generator",))["base of the adapters"] == 1.0
    for config, accelerated in ((sharded, False), (adapted, True)):
        assert "base of the adapters" not in memory_gib(config, SIZE, ("generator",), accelerated=accelerated)
    half = tiny(GRPOConfig, tmp_path, engine={"dtype": "bfloat16"})
    assert memory_gib(half, SIZE, roles)["generator's own weights"] == 0.5


def test_a_generator_on_an_accelerator_takes_the_memory_of_bfloat16(tmp_path: Path) -> None:
    roles = ("policy", "generator")
    config = tiny(GRPOConfig, tmp_path)
    assert memory_gib(config, SIZE, roles, accelerated=True)["generator's own weights"] == 0.5
    exact = tiny(GRPOConfig, tmp_path, parallel={"precision": "float32"})
    assert exact.resolved_engine.dtype == "float32"
    assert config.resolved_engine.dtype is None
    half = tiny(GRPOConfig, tmp_path, parallel={"precision": "float16"})
    assert half.resolved_engine.dtype == "float16", "bfloat16 would round eight times as coarsely as the trainer does"
    half = tiny(GRPOConfig, tmp_path, parallel={"precision": "float16"}, engine={"dtype": "bfloat16"})
    assert half.resolved_engine.dtype == "bfloat16"
    assert "generator's own weights" not in memory_gib(exact, SIZE, roles, accelerated=True)


def test_the_native_engine_has_lanes_of_its_sizes_in_float32_on_a_cpu(tmp_path: Path) -> None:
    """9 completions of 8 + 3 tokens stand in 16 lanes of 32 positions."""
    size = replace(SIZE, native=True)
    config = tiny(GRPOConfig, tmp_path, batch={"prompts": 3}, sampling={"n": 3, "max_new_tokens": 3})
    amounts = Amounts.of(config, [8] * 20)
    for accelerated, width in ((False, 4), (True, 2)):
        parts = memory_gib(config, size, ("generator",), amounts=amounts, accelerated=accelerated)
        assert parts["key/value cache"] == 16 * 32 * 2 * width / 2**30
    other = memory_gib(config, SIZE, ("generator",), amounts=amounts)
    assert other["key/value cache"] == 9 * 11 * 2 * 4 / 2**30
    long = tiny(GRPOConfig, tmp_path, sampling={"max_new_tokens": 300})
    assert "shorter cache, while it grows" in memory_gib(long, size, ("generator",))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="nothing is packed without MKL")
def test_the_native_engine_packs_matrices_for_long_completions_in_float32_on_a_cpu(tmp_path: Path) -> None:
    """Not the embedding, and never on an accelerator, in bfloat16, of experts, of small models or short completions."""
    size = replace(SIZE, native=True, parameters=2**22, outside=2**21, vocabulary=2**10, hidden=2**6)
    long, short = (tiny(GRPOConfig, tmp_path, sampling={"max_new_tokens": tokens}) for tokens in (24, 23))
    assert memory_gib(long, size, ("generator",))["packed matrices"] == (2**22 - 2**21 + 2**16) * 4 / 2**30
    bfloat16 = tiny(GRPOConfig, tmp_path, sampling={"max_new_tokens": 24}, engine={"dtype": "bfloat16"})
    others = [(short, size), (bfloat16, size)]
    others += [(long, replace(size, **{name: value})) for name, value in
               (("native", False), ("experts", 8), ("parameters", 2**21 + 2**20))]  # fmt: skip
    for config, other in others:
        assert "packed matrices" not in memory_gib(config, other, ("generator",))
    assert "packed matrices" not in memory_gib(long, size, ("generator",), accelerated=True)
    assert "packed matrices" not in memory_gib(long, size, ("policy",))


def test_the_plan_says_where_one_generator_with_all_cores_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advise(layout: str = "colocated", backend: str = "local", **placement: Any) -> str:
        config = tiny(GRPOConfig, tmp_path, placement={"layout": layout, **placement})
        return describe_memory(config, backend).partition("fewer ranks")[2]

    assert not advise(ranks=2), "the tiny model is small"
    monkeypatch.setattr(memory, "_LARGE_MATRICES", 0)
    assert advise(ranks=2).endswith("is faster: placement.ranks: 1")
    assert advise("split", ranks=1, generator_ranks=2).endswith("is faster: placement.generator_ranks: 1")
    assert not advise("split", ranks=2, generator_ranks=1)
    assert not advise(ranks=1)
    judged = tiny(GRPOConfig, tmp_path, placement={"ranks": 2}, eval={"items": 100})
    assert "fewer ranks" in describe_memory(judged, "local"), "training decides, which draws few rows"
    many = tiny(GRPOConfig, tmp_path, placement={"ranks": 2}, batch={"prompts": 17})
    assert "fewer ranks" not in describe_memory(many, "local")
    sharded = tiny(GRPOConfig, tmp_path, placement={"ranks": 2}, parallel={"strategy": "fsdp2"})
    assert "fewer ranks" not in describe_memory(sharded, "local")


def test_the_cache_is_at_most_what_the_engine_may_hold(tmp_path: Path) -> None:
    size = replace(SIZE, key_value_width=2**20)
    assert memory_gib(tiny(GRPOConfig, tmp_path), size, ("generator",))["key/value cache"] > 1.0
    capped = tiny(GRPOConfig, tmp_path, engine={"cache_gib": 0.5})
    assert memory_gib(capped, size, ("generator",))["key/value cache"] == 0.5


def test_a_cache_in_which_the_longest_completion_does_not_fit_is_refused_as_the_engine_refuses_it(
    tmp_path: Path,
) -> None:
    """The engine decodes in at least 16 lanes of a multiple of 32 positions."""
    model = model_size(tiny(GRPOConfig, tmp_path).model)
    lanes = 16 * 64 * model.layers * 2 * model.key_value_width * 4 / 2**30

    def describe(gib: float, lengths: list[int] | None, **engine: Any) -> str:
        config = tiny(
            GRPOConfig,
            tmp_path,
            engine={"cache_gib": gib, **engine},
            sampling={"max_new_tokens": 24},
            eval={"items": 0},
        )
        return describe_memory(config, "local", {}, lengths)

    assert "key/value cache" in describe(lanes, [5, 40])
    with pytest.raises(
        ConfigError, match=r"engine.cache_gib = .* too little for the longest prompt of the training data"
    ):
        describe(lanes, [5, 41])
    assert "key/value cache" in describe(lanes, None), "nobody knows how long a session will be"
    assert "key/value cache" in describe(lanes, [5, 41], name="transformers"), "it does not read the setting"


def test_the_estimate_follows_the_batch_that_the_data_can_have(tmp_path: Path) -> None:
    """The step has 16 rows of 4 prompts; the longest row has 30 tokens of the prompt, and 6 that are sampled. Nothing
    follows the last one, which is no input. Rows share their prompts."""
    settings = {"batch": {"prompts": 4}, "sampling": {"n": 4, "max_new_tokens": 6}, "eval": {"items": 20}}
    lengths = [10, 30, 20, 5, 5, 5]
    config = tiny(GRPOConfig, tmp_path, **settings)
    whole = Amounts.of(config, lengths)
    assert whole.tokens == 30 + 20 + 10 + 5 + 16 * 5
    assert whole.rows[:5] == (*[Row(0, 30, 6)] * 4, Row(1, 20, 6))
    assert (whole.passes, whole.sequences, whole.length, whole.prompts) == (1, 20, 36, 75)
    padded = replace(config, parallel=replace(config.parallel, batching="padded"))
    assert Amounts.of(padded, lengths).tokens == 16 * 35, "padded rows are as long as the longest, and share nothing"
    packed = replace(config, parallel=replace(config.parallel, batching="packed"))
    assert Amounts.of(packed, lengths).tokens == 4 * (30 + 20 + 10 + 5) + 16 * 5
    small = replace(config, parallel=replace(config.parallel, micro_batch_tokens=8))
    assert Amounts.of(small, lengths).tokens == 35, "a row is computed as a whole"
    assert Amounts.of(small, lengths).passes == 16
    ranks = Amounts.of(replace(config, placement=replace(config.placement, ranks=2)), lengths)
    assert (ranks.tokens, ranks.sequences) == (30 + 20 + 8 * 5, 10)
    unknown = Amounts.of(config, None)
    assert unknown.length == config.data.max_prompt_tokens + 6
    assert {row.inputs for row in unknown.rows} == {unknown.length - 1}
    tuned = tiny(SFTConfig, tmp_path, batch={"examples": 3})
    assert Amounts.of(tuned, lengths).tokens == 3 * 29


def test_the_plan_shows_each_kind_of_process_and_all_together(tmp_path: Path) -> None:
    split = tiny(GRPOConfig, tmp_path, placement={"layout": "split", "ranks": 3})
    plan = describe_plan(split, "local").partition("# plan")[2]
    assert "16 rows; 5.3 a rank" in plan
    plan = describe_memory(split, "local")
    assert " each on processes 0-2 (estimate):\n  weights" in plan
    assert " on process 3 (estimate):\n  generator's own weights" in plan
    assert plan.splitlines()[-2].endswith("on all processes")
    assert plan.splitlines()[-1].startswith("not counted  Python and its libraries")
    alone = describe_memory(tiny(GRPOConfig, tmp_path), "local")
    assert " on process 0 (estimate):" in alone
    assert "all processes" not in alone


def test_a_critic_of_another_model_has_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {**MODEL, "config": {**MODEL["config"], "intermediate_size": 128}}
    policy, critic = ModelConfig(**MODEL), ModelConfig(**wide)
    load_model(critic).save_pretrained(tmp_path / "critic")
    monkeypatch.chdir(tmp_path)
    config = tiny(PPOConfig, tmp_path, critic={"path": "critic"})
    parameters = model_size(critic).parameters
    assert parameters == model_size(policy).parameters + 3 * 32 * 64
    lines = " ".join(describe_memory(config, "local").split())
    assert f"critic with optimizer {3 * 4 * parameters / 2**20:.1f} MiB" in lines


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"train": "absent.jsonl"}}, DataError, r"no file absent\.jsonl"),
        ({"data": {"eval": "./absent/part-*"}}, DataError, r"no file \./absent/part-\*"),
        ({"reward": {"name": "exat"}}, ConfigError, "did you mean exact"),
        ({"reward": {"name": "absent.py:score"}}, ConfigError, r"no file .*absent\.py"),
    ],
)
def test_what_is_not_there_is_found_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, dict[str, str]],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        describe_plan(tiny(GRPOConfig, tmp_path, **sections), "local")


def test_what_only_the_run_can_find_is_left_to_it(tmp_path: Path) -> None:
    config = tiny(
        GRPOConfig,
        tmp_path,
        data={"train": "an_owner/a_dataset", "eval": "reasoning_gym:chain_sum"},
        reward={"name": "a_module.of_mine:score"},
    )
    assert "an_owner/a_dataset" in describe_plan(config, "local")


@pytest.mark.parametrize("kl", [{}, {"kl_in": "loss", "kl_estimator": "k3"}])
@pytest.mark.parametrize("root", [GRPOConfig, PPOConfig, SFTConfig])
def test_the_roles_that_are_planned_are_those_that_start(
    root: type[GRPOConfig | PPOConfig | SFTConfig], kl: dict[str, str], tmp_path: Path
) -> None:
    algorithm = {} if root is SFTConfig else {"algorithm": kl}
    for items in (0, 4):
        config = tiny(root, tmp_path, eval={"items": items}, **algorithm)
        assert tuple(bind_roles(config)) == config.roles


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("sections", "backend", "message"),
    [
        (
            {"placement": {"ranks": 2}},
            "inline",
            r"placement\.ranks = 2: inline .*use the backend local",
        ),
        ({"placement": {"cpus": 500}}, "local", r"placement\.cpus = 500: 1 worker process .* leave it out"),
        ({"placement": {"cpus": CORES, "ranks": 2}}, "local", r"placement\.cpus = \d+: 2 worker processes"),
        ({"engine": {"name": "vllm"}}, "local", r"engine\.name = 'vllm': .* pip install 'vllm>=0\.32'"),
        (
            {"run": {"trackers": ["trackio"]}},
            "local",
            r"trackio, .*: pip install 'trackio>=0\.5'$",
        ),
        ({"run": {"schedule": "absent.py:mine"}}, "local", r"run\.schedule = .*no file .*absent\.py"),
        ({"run": {"profile": ["critic.update"]}}, "local", r"run\.profile = critic\.update: expected ROLE\.ENDPOINT"),
        (
            {"run": {"schedule": "one_step_off"}},
            "local",
            r"run\.schedule = .* at the same time, .*set placement\.layout to split",
        ),
        ({"run": {"schedule": "operator:add"}}, "local", r"run\.schedule = .*'add' must take exactly one argument"),
        (
            {"model": {"path": "./absent", "config": {}}},
            "local",
            r"model\.path = .*: this directory does not exist",
        ),
        ({"algorithm": {"advantage": "absent.py:mine"}}, "local", r"algorithm\.advantage = .*no file .*absent\.py"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], backend: str, message: str
) -> None:
    for name in ("vllm", "trackio"):
        if find_spec(name) is not None and name in message:
            pytest.skip(f"{name} is installed here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        describe_plan(tiny(GRPOConfig, tmp_path, **sections), backend)


def test_a_refused_configuration_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    script = (
        "import sys; from podium.cli import main\n"
        "assert main(sys.argv[1:]) == 2\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    words = ["train", "grpo", "--dry-run", "--data.train", "train.jsonl", "--placement.cpus", "500"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "placement.cpus = 500" in done.stderr
    assert done.stdout == "[]\n"
