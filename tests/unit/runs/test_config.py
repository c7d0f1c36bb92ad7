"""The whole configuration: how large it is, what it defaults to, and which settings contradict each other."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.algorithms.declarations import ADVANTAGES, CORRECTIONS, LOSSES
from podium.config import config_to_dict
from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS
from podium.trainer import (
    GRPOConfig,
    InferenceConfig,
    PPOConfig,
    SFTConfig,
    build_config,
    config_to_yaml,
    keys_of,
    load_config,
)
from podium_preferences import DPOConfig, RMConfig

TABLE = {"a": {"roles": ["policy"], "ranks": 2}, "b": {"roles": ["generator"]}}
ROOTS = [GRPOConfig, PPOConfig, SFTConfig, DPOConfig, RMConfig, InferenceConfig]


KEYS = {key.path: key for root in ROOTS for key in keys_of(root)}
NUMBERS = [path for path, key in KEYS.items() if "number" in key.expects or "integer" in key.expects]


def test_the_configuration_imports_no_torch() -> None:
    names = ", ".join(root.__name__ for root in ROOTS if root.__module__.startswith("podium."))
    script = (
        "import sys; from podium_preferences import DPOConfig, RMConfig\n"
        f"from podium.trainer import {names}, keys_of, config_to_yaml\n"
        f"for root in ({names}, DPOConfig, RMConfig):\n"
        "    print(config_to_yaml(root()), [key.doc for key in keys_of(root)])\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


def nested(path: str, value: object) -> dict[str, Any]:
    """``value`` at ``path``, beside what its sections require."""
    *sections, key = path.split(".")
    values: dict[str, Any] = {key: value}
    for name in reversed(sections):
        values = {name: {"path": "x", **values} if name == "model" else values}
    return values


@pytest.mark.parametrize("root", ROOTS)
def test_a_recipe_has_at_most_120_keys(root: type) -> None:
    assert len(keys_of(root)) <= 120


@pytest.mark.parametrize("path", KEYS)
def test_the_help_of_a_key_is_a_sentence(path: str) -> None:
    words = KEYS[path].doc.split()
    assert len(words) > 3
    assert words[-1].endswith(".")
    assert words[0].lower() not in ("of", "for", "whether", "how", "which", "what", "where")


NAMES = {
    "reward.name": NAMED_REWARDS,
    "algorithm.advantage": ADVANTAGES.own,
    "algorithm.loss": LOSSES.own,
    "algorithm.correction": CORRECTIONS.own,
}


@pytest.mark.parametrize("path", NAMES)
def test_the_help_lists_podiums_own_functions_and_no_function_of_a_package_among_them(path: str) -> None:
    help_text = next(key.doc for key in keys_of(GRPOConfig) if key.path == path)
    own, between, packaged = help_text.partition("one of an installed package, such as")
    assert between
    names = {name for name in re.findall(r"(\w+),", own.partition(": ")[2]) if name != "function"}
    assert names == set(NAMES[path])
    examples = set(re.findall(r"\w+", packaged.partition(".")[0].partition("module:")[0]))
    assert not examples & set(NAMES[path])


FORMS = ("algorithm.entropy_coef", "algorithm.epochs")  # a number, or a mapping whose entries have defaults


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_is_accepted_or_refused_by_the_name_of_its_key(path: str) -> None:
    root = next(root for root in ROOTS if path in {key.path for key in keys_of(root)})
    for value in (math.nan, math.inf, -math.inf, -1, 1e30, "x", [], {}, None, 10**30):
        try:
            found = build_config(root, nested(path, value))
        except ConfigError as error:
            assert path in str(error)
        else:
            assert value in (None, [], -1) or (value == {} and path in FORMS)
            assert isinstance(found, root)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optim.eps", -1),
        ("optim.eps", 0),
        ("optim.grad_clip", math.nan),
        ("optim.weight_decay", math.inf),
        ("optim.warmup_steps", -1),
        ("optim.betas", [0.9, 1.0]),
        ("optim.betas", [0.9]),
        ("optim.lr", 1e30),
        ("sampling.temperature", 1e30),
        ("sampling.stop_token_ids", [-5]),
        ("sampling.top_p", 0),
        ("sampling.max_new_tokens", 0),
        ("model.lora.rank", 1000000),
        ("model.lora.dropout", 1),
        ("model.seed", -1),
        ("engine.max_sequences", 0),
        ("engine.cache_gib", 0),
        ("engine.dtype", "fp8"),
        ("parallel.precision", "fp8"),
        ("parallel.batching", "dense"),
        ("placement.ranks", 0),
        ("data.holdout", 1),
        ("data.prompt_column", ""),
        ("reward.time_limit_s", 0),
        ("reward.name", " "),
        ("run.timeout_s", math.inf),
        ("eval.stop_at", 2e9),
        ("algorithm.gamma", 1.5),
        ("algorithm.clip_low", 2),
        ("algorithm.kl_in", "rewards"),
        ("algorithm.aggregation", "token_mean"),
        ("critic.lr", -1),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_expected(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(path)} = .*: expected ") as caught:
        build_config(PPOConfig, nested(path, value))
    expected = KEYS[path].expects
    assert expected in str(caught.value).replace("a finite number", "a number")


@pytest.mark.parametrize("root", ROOTS)
def test_the_defaults_make_a_configuration_that_reads_back_equal(root: type, tmp_path: Path) -> None:
    config = build_config(root, {})
    assert config == root()
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(root, path) == config


def test_recipes_differ_where_they_should() -> None:
    grpo, ppo = build_config(GRPOConfig, {}), build_config(PPOConfig, {})
    assert (grpo.has_critic, grpo.sampling.n, grpo.algorithm.advantage) == (False, 8, "grpo")
    assert (ppo.has_critic, ppo.sampling.n, ppo.algorithm.advantage) == (True, 1, "gae")
    partly = build_config(PPOConfig, {"algorithm": {"gamma": 0.9}, "sampling": {"n": 2}})
    assert (partly.algorithm.advantage, partly.sampling.max_new_tokens) == ("gae", 256)


@pytest.mark.parametrize(
    ("root", "values", "message"),
    [
        (GRPOConfig, {"sampling": {"n": 1}}, r"sampling\.n = 1 with algorithm\.advantage = 'grpo'.*at least 2"),
        (
            GRPOConfig,
            {"batch": {"prompts": 5}, "algorithm": {"minibatches": 3}},
            r"5 x 8 = 40 completions do not divide into algorithm\.minibatches = 3.*such as [24]",
        ),
        (
            GRPOConfig,
            {"batch": {"prompts": 1}, "sampling": {"n": 2}, "placement": {"ranks": 4}},
            r"a minibatch has 2 completions .* placement\.ranks = 4: each rank needs at least one",
        ),
        (GRPOConfig, {"sampling": {"temperature": 0}}, r"sampling\.temperature = 0\.0: expected above 0"),
        (SFTConfig, {"batch": {"examples": 1}, "placement": {"ranks": 2}}, r"batch\.examples = 1 for placement\.ranks"),
        (GRPOConfig, {"placement": {"generator_ranks": 2}}, "the generator then shares the policy's ranks"),
        (GRPOConfig, {"placement": {"delta_sync": True}}, "the generator then shares the policy's ranks"),
        (
            SFTConfig,
            {"placement": {"pools": TABLE, "ranks": 2}},
            r"placement\.ranks = 2 with placement\.pools: .*leave",
        ),
        (
            SFTConfig,
            {"placement": {"pools": TABLE, "layout": "split"}},
            r"placement\.layout = split with placement\.pools",
        ),
        (
            GRPOConfig,
            {"placement": {"pools": TABLE}, "algorithm": {"kl_in": "loss"}},
            "no place for the reference: write",
        ),
        (
            GRPOConfig,
            {"placement": {"pools": {**TABLE, "v": {"roles": ["critic"]}}}},
            r"pools\.v\.roles has critic, and",
        ),
        (GRPOConfig, {"placement": {"pools": {**TABLE, "b": {"roles": ["policy"]}}}}, "the role policy more than once"),
        (GRPOConfig, {"placement": {"pools": {"a": {"roles": ["polcy"]}}}}, r"pools\.a\.roles = .*one of policy, ref"),
        (
            GRPOConfig,
            {"placement": {"pools": {"a": {"rolles": ["policy"]}}}},
            r"key placement\.pools\.a\.rolles .* mean",
        ),
        (
            GRPOConfig,
            {"placement": {"pools": {"a": {"roles": []}}}},
            r"pools\.a\.roles = \[\]: expected a list that is not",
        ),
        (
            PPOConfig,
            {
                "batch": {"prompts": 2},
                "placement": {"pools": {**TABLE, "v": {"roles": ["reference", "critic"], "ranks": 3}}},
            },
            r"a minibatch has 2 completions .* for placement\.pools\.v\.ranks = 3: each rank needs at least one",
        ),
        (
            GRPOConfig,
            {"placement": {"pools": {"a": {"roles": ["policy", "generator"]}}, "delta_sync": True}},
            "give the generator another pool",
        ),
        (GRPOConfig, {"engine": {"name": "nativ"}}, r"engine\.name = 'nativ': expected auto or .*mean native"),
        (GRPOConfig, {"run": {"schedule": "async"}}, r"run\.schedule = 'async': expected one of sync"),
        (GRPOConfig, {"model": {"path": "a", "config": {"model_type": "qwen3"}}}, r"give either model\.path .* or"),
        (GRPOConfig, {"algorithm": {"advantage": "grppo"}}, "did you mean grpo"),
        (GRPOConfig, {"algorithm": {"clip_lo": 0.1}}, r"unknown key algorithm\.clip_lo.*algorithm\.clip_low\?"),
        (SFTConfig, {"algorithm": {}}, r"unknown key algorithm \(value \{\}\)"),
        (SFTConfig, {"batch": {"prompts": 4}}, r"unknown key batch\.prompts"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(root: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(root, values)


def test_a_table_places_each_role(tmp_path: Path) -> None:
    table = {**TABLE, "v": {"roles": ["critic", "reference"], "ranks": 3}}
    config = build_config(PPOConfig, {"placement": {"pools": table}})
    assert config.processes == [(("policy", "estimator"), 2), (("generator",), 1), (("reference", "critic"), 3)]
    assert (config.placement.generators, config.placement.reads_policy) == (1, False)
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(PPOConfig, path) == config
    assert load_config(PPOConfig, path, ["--placement.pools.b.ranks", "2"]).placement.generators == 2


def test_to_build_a_configuration_runs_no_code(tmp_path: Path) -> None:
    """It may be a stranger's. The demands of an advantage in a file are checked with all else that is loaded."""
    (tmp_path / "mine.py").write_text(
        "from podium.algorithms import Declaration\nopen(__file__ + '.ran', 'w').close()\n"
        "@Declaration(needs_groups=True, needs_values=True)\ndef mine(inputs, config): ...\n"
    )
    algorithm = {"advantage": f"{tmp_path}/mine.py:mine"}
    config = build_config(GRPOConfig, {"sampling": {"n": 1}, "algorithm": algorithm, "placement": {"pools": TABLE}})
    assert not (tmp_path / "mine.py.ran").exists()
    with pytest.raises(ConfigError, match="no place for the critic"):
        config.check_roles(load=True)
    with pytest.raises(ConfigError, match=r"sampling\.n = 1 with algorithm\.advantage = .*mine', which compares"):
        build_config(GRPOConfig, {"sampling": {"n": 1}, "algorithm": algorithm}).check_roles(load=True)


def test_a_schedule_ends_with_the_run() -> None:
    values = {"run": {"steps": 10}, "algorithm": {"minibatches": 2}, "optim": {"lr_schedule": "cosine"}}
    assert build_config(GRPOConfig, values).ending_optim.end == 20
    with pytest.raises(ConfigError, match=r"unknown key optim\.total_steps"):
        build_config(GRPOConfig, {**values, "optim": {"lr_schedule": "linear", "total_steps": 7}})
    with pytest.raises(ConfigError, match="warmup_steps = 20 is not below the 20 optimizer steps of the run"):
        build_config(GRPOConfig, {**values, "optim": {"lr_schedule": "cosine", "warmup_steps": 20}})


def test_the_schedule_of_the_policy_counts_the_steps_that_it_takes() -> None:
    """A critic with a model of its own warms up alone. A head on the policy's model takes the policy's steps."""
    values: dict[str, Any] = {
        "run": {"steps": 10},
        "optim": {"lr_schedule": "linear", "lr": 1.0},
        "critic": {"lr": 2.0},
    }
    for trunk, ends in (("separate", 12), ("shared", 20)):
        options = {"critic_warmup": 4, "critic_trunk": trunk}
        config = build_config(PPOConfig, {**values, "algorithm": {"minibatches": 2, "options": options}})
        assert config.ending_optim.end == ends
        assert config.critic_optim.end == 20
        assert config.critic_optim.lr == 2.0
    optim = {"lr_schedule": "linear", "warmup_steps": 6}
    for trunk in ("separate", "shared"):
        options = {"critic_warmup": 4, "critic_trunk": trunk}
        with pytest.raises(
            ConfigError,
            match=r"warmup_steps = 6 is not below the 6 optimizer steps of the run.*raise run\.steps; of 10 steps "
            r"algorithm\.options\.critic_warmup = 4 leaves 6 to the policy",
        ):
            build_config(PPOConfig, {**values, "optim": optim, "algorithm": {"options": options}})
    warm_only = {"critic_warmup": 10}
    assert build_config(PPOConfig, {**values, "algorithm": {"options": warm_only}}).ending_optim.end == 10


@pytest.mark.parametrize(("n", "options"), [(4, {}), (3, {"pass_k": 3}), (2, {"pass_k": 5})])
def test_groups_that_teach_an_estimator_nothing_are_refused(n: int, options: dict[str, Any]) -> None:
    """The run ended in its first step."""
    algorithm, k = {"advantage": "pass_at_k", "options": options}, options.get("pass_k", 4)
    with pytest.raises(ConfigError, match=rf"sampling\.n = {n} with .*'pass_at_k' and .*pass_k = {k}: .*above {k}, or"):
        build_config(GRPOConfig, {"sampling": {"n": n}, "algorithm": algorithm})
    build_config(GRPOConfig, {"sampling": {"n": k + 1}, "algorithm": algorithm})


@pytest.mark.parametrize("advantage", ["gdpo", "maxrl", "pass_at_k"])
def test_a_kl_in_the_reward_is_refused_where_rewards_are_compared_with_a_bound(advantage: str) -> None:
    algorithm = {"advantage": advantage, "kl_in": "reward", "kl_coef": 0.1}
    with pytest.raises(ConfigError, match=rf"kl_in = 'reward' with .*'{advantage}'.*set algorithm\.kl_in to loss"):
        build_config(GRPOConfig, {"algorithm": algorithm})
    build_config(GRPOConfig, {"algorithm": {**algorithm, "kl_in": "loss"}})
    build_config(GRPOConfig, {"algorithm": {**algorithm, "advantage": "grpo"}})


def test_a_negative_score_of_failures_is_refused_where_rewards_must_not_be_negative() -> None:
    config = {"algorithm": {"advantage": "maxrl"}, "reward": {"failure_score": -1.0}}
    with pytest.raises(ConfigError, match=r"reward\.failure_score = -1 with .*'maxrl'.*set it to 0"):
        build_config(GRPOConfig, config)
    build_config(GRPOConfig, {**config, "algorithm": {"advantage": "grpo"}})
    build_config(GRPOConfig, {**config, "reward": {"failure_score": 0.0}})


def test_a_generator_has_the_policys_ranks_or_its_own() -> None:
    assert build_config(GRPOConfig, {"placement": {"layout": "split", "ranks": 3}}).placement.generators == 1
    assert build_config(GRPOConfig, {"placement": {"ranks": 3}}).placement.generators == 3


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("a.jsonl", {"": "a.jsonl"}),
        ("[ab]*.jsonl", {"": "[ab]*.jsonl"}),
        ("[x/a.jsonl, b.jsonl]", {"a": "x/a.jsonl", "b": "b.jsonl"}),
        ("[x/a.jsonl, y/a.jsonl]", {"x/a.jsonl": "x/a.jsonl", "y/a.jsonl": "y/a.jsonl"}),
        ("{math: a.jsonl, code: 'reasoning_gym:x'}", {"math": "a.jsonl", "code": "reasoning_gym:x"}),
    ],
)
def test_evaluation_sets_are_one_place_a_list_or_a_mapping(text: str, sets: dict[str, str]) -> None:
    config = load_config(GRPOConfig, None, ["--data.eval", text])
    assert config.data.eval_sets == sets
    assert build_config(GRPOConfig, config_to_dict(config)).data.eval_sets == sets
    assert list(config.data.eval_sets) == list(sets)


@pytest.mark.parametrize("wrong", [[], {}, ["a.jsonl", ""], {"math": ""}])
def test_an_evaluation_set_without_a_place_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval"):
        build_config(GRPOConfig, {"data": {"eval": wrong}})


def test_weights_that_an_estimator_does_not_read_are_refused() -> None:
    words = ["--reward.name", "[exact, fraction]", "--reward.weights", "[1, 0.2]", "--algorithm.advantage"]
    with pytest.raises(
        ConfigError, match=r"reward\.weights = \[1\.0, 0\.2\] with .*'gdpo'.*set algorithm\.options\.part_w"
    ):
        load_config(GRPOConfig, None, [*words, "gdpo"]).check_roles()
    parts = ["--algorithm.options", "{part_weights: {exact: 1, fraction: 0.2}}"]
    load_config(GRPOConfig, None, [*words, "gdpo", *parts]).check_roles()
    load_config(GRPOConfig, None, [*words, "grpo"]).check_roles()
