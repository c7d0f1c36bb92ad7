"""A setting that another project calls by another name is answered with ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from podium.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, NamedFunctions
from podium.cli import main
from podium.config import build_config, keys_of, load_config
from podium.errors import ConfigError
from podium.rewards.resolve import resolve_reward
from podium.rollout.engines.config import EngineConfig, NativeOptions
from podium.runs.recipes import find_recipe, list_recipes
from podium.trainer import GRPOConfig, InferenceConfig, SFTConfig
from podium_migration.tables import Equivalent, Table, find_equivalent, find_translation, read_tables, read_values

TRL = (
    "learning_rate num_generations max_completion_length max_prompt_length beta epsilon epsilon_high delta loss_type "
    "per_device_train_batch_size gradient_accumulation_steps num_iterations steps_per_generation scale_rewards "
    "reward_funcs reward_weights use_vllm vllm_mode max_steps num_train_epochs lr_scheduler_type warmup_ratio "
    "max_grad_norm output_dir run_name report_to save_steps eval_steps logging_steps bf16 gradient_checkpointing "
    "model_name_or_path dataset_name lora_r lora_alpha lora_target_modules use_peft seed temperature "
    "push_to_hub hub_model_id load_best_model_at_end metric_for_best_model eval_on_start mask_truncated_completions "
    "load_in_4bit repetition_penalty min_p sync_ref_model ref_model_sync_steps top_entropy_quantile"
)


ANSWERS = {(table.project, name): answer for table in read_tables() for name, answer in table.answers.items()}
CONFIGS = [find_recipe(name).config for name in list_recipes()]
PATHS_OF = {cls: {key.path for key in keys_of(cls)} for cls in CONFIGS}
KEYS = {key.path: key for cls in CONFIGS for key in keys_of(cls)}


def list_answers() -> list[tuple[str, Equivalent]]:
    """Every answer of every table, those for other recipes too."""
    return [(name, each) for (_, name), answer in ANSWERS.items() for each in (answer, *answer.otherwise)]


def test_every_answer_is_a_key_of_a_recipe() -> None:
    assert len(ANSWERS) > 700
    for name, answer in list_answers():
        assert not answer.key or answer.key.startswith(tuple(KEYS)), name
        assert answer.key or answer.remark, name
        assert not (answer.key and answer.missing), name


def test_every_value_of_the_tables_is_one_that_its_key_takes() -> None:
    translations = [(key, value) for key, values in read_values().items() for value in values.values()]
    translations += [
        (value.key or answer.key, value) for _, answer in list_answers() for value in answer.values.values()
    ]
    for key, translation in translations:
        assert key in KEYS, key
        assert translation.missing or translation.value is not None or "null" in KEYS[key].expects, key
        assert not translation.missing or translation.remark, key
        if not translation.missing:
            values = nest(key, translation.value)
            of_recipes = [collect_mistakes(values, cls) for cls in CONFIGS if key in PATHS_OF[cls]]
            wrong = [[line for line in lines if line.startswith(f"{key} = ")] for lines in of_recipes]
            assert [] in wrong or all("expected kl_coef" in line for lines in wrong for line in lines), wrong


def collect_mistakes(values: dict[str, Any], cls: type = GRPOConfig) -> list[str]:
    try:
        build_config(cls, values)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("known", [ADVANTAGES, LOSSES], ids=lambda known: known.key)
def test_a_function_that_podium_has_is_not_called_missing(known: NamedFunctions) -> None:
    for name, translation in read_values()[known.key].items():
        assert name.replace("-", "_") not in known or translation.value in known, name


@pytest.mark.parametrize("name", TRL.split())
def test_a_name_of_trl_is_answered(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, [f"--{name}", "1"])
    answer = ANSWERS["TRL", name]
    lacking = "Podium has none:" if answer.missing else "and needs none:"
    assert (f"did you mean {answer.key}?" if answer.key else lacking) in re.sub(
        r"(\w): \w+\?", r"\1?", str(caught.value)
    )
    assert answer.remark in str(caught.value)


VERL = {  # what nearest names answered wrongly, or not at all
    "val_kwargs.temperature": "eval.temperature",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "",
    "rollout.dtype": "engine.dtype",
    "train_max_samples": "data.train_items",
    "data.truncation": "data.overlong",
    "val_before_train": "eval.at_start",
    "critic.model.enable_gradient_checkpointing": "",
    "policy_loss.loss_mode": "algorithm.loss",
    "val_kwargs.n": "eval.temperature",
    "algorithm.filter_groups.enable": "batch.prompts",
    "reward.reward_manager.name": "reward.name",
    "trainer.critic_warmup": "algorithm.options.critic_warmup",
    "trainer.balance_batch": "",
    "actor.ulysses_sequence_parallel_size": "",
    "trainer.rollout_data_dir": "",
    "trainer.max_actor_ckpt_to_keep": "save.keep",
    "gpu_memory_utilization": "engine.cache_gib",
    "actor.fsdp_config.param_offload": "parallel.offload",
    "algorithm.kl_penalty": "algorithm.kl_estimator",
    "trainer.resume_mode": "run.resume",
    "actor_rollout_ref.actor.megatron.anything.at_all": "",
    "critic.profiler.tool_config.npu.level": "",
}


@pytest.mark.parametrize(("name", "key"), VERL.items())
def test_an_answer_to_verl_comes_from_the_table_alone(name: str, key: str) -> None:
    (line,) = collect_mistakes(nest(name, "1"))
    assert line.startswith(f"unknown key {name} (value '1')")
    assert f"did you mean {key}" in line if key else "did you mean" not in line
    assert "the configuration has" not in line


def nest(path: str, value: object) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return cast("dict[str, Any]", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temprature_of_evaluation", 1),
        ("foo.temperature", 1),
        ("data.trian", 3),  # data.train takes text
        ("sampling.tempereture_", "hot"),
        ("keep", 3),
        ("optim.learning", 3),
    ],
)
def test_what_no_table_knows_and_is_no_typing_error_gets_the_names_of_the_section(name: str, value: object) -> None:
    (line,) = collect_mistakes(nest(name, value))
    assert "did you mean" not in line
    assert re.search(r"(the configuration|data|sampling|optim) has \w+, ", line)


def test_a_typing_error_is_one_or_two_letters_in_the_same_section() -> None:
    for wrong, right in {"optim.l": "lr", "optim.grad_clp": "grad_clip", "sampling.temprature": "temperature"}.items():
        assert f"did you mean {wrong.partition('.')[0]}.{right}?" in collect_mistakes(nest(wrong, 1))[0]


@pytest.mark.parametrize("table", read_tables(), ids=lambda table: table.project)
def test_a_setting_has_the_answer_of_its_own_table(table: Table) -> None:
    """No other table's answer comes between, unless it has a setting of exactly this name that means something else."""
    for name, answer in table.answers.items():
        exact = {(each.answers[name].key, each.answers[name].missing) for each in read_tables() if name in each.answers}
        found = find_equivalent(name)
        assert found is not None
        assert found.several if len(exact) > 1 else (found.key, found.missing) == (answer.key, answer.missing), name


def test_a_name_with_several_meanings_lists_them() -> None:
    (line,) = collect_mistakes({"lr": 1e-6})
    assert "actor_rollout_ref.actor.optim.lr is optim.lr" in line
    assert "critic.optim.lr is critic.lr" in line


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        ("algorithm.aggregation", "seq-mean-token-mean", "sequence-mean"),
        ("algorithm.advantage", "reinforce_plus_plus", "reinforce_pp"),
        ("algorithm.loss", "grpo", "ppo_clip"),
        ("algorithm.loss", "dapo", "ppo_clip"),
        ("algorithm.advantage", "ppo", "gae"),
        ("algorithm.kl_estimator", "low_var_kl", "k3"),
        ("optim.lr_schedule", "constant_with_warmup", "constant"),
        ("model.lora.targets", "all-linear", "[]"),
        ("sampling.top_k", -1, "0"),
        ("save.every", -1, "0"),
        ("parallel.precision", "bf16", "bfloat16"),
        ("engine.name", "hf", "transformers"),
        ("run.schedule", "separate_async", "asynchronous"),
    ],
)
def test_a_value_of_another_project_is_answered_with_ours(key: str, theirs: object, ours: str) -> None:
    translation = find_translation(key, theirs)
    assert translation is not None
    (line,) = collect_mistakes(nest(key, theirs))
    assert re.search(rf"; did you mean '?{re.escape(ours)}'?\?", line)
    assert translation.remark in line


def test_a_reward_of_another_project_is_answered() -> None:
    with pytest.raises(ConfigError, match="did you mean math\\? it needs math-verify"):
        resolve_reward("accuracy_reward")
    with pytest.raises(ConfigError, match="there are no managers of rewards"):
        resolve_reward("naive")


def test_a_value_that_podium_lacks_says_what_is_nearest() -> None:
    (line,) = collect_mistakes({"algorithm": {"advantage": "flash_reinforce"}})
    assert "; an estimator is a function of the group's rewards: docs/algorithms.md writes one; your own" in line
    (line,) = collect_mistakes(nest("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum"))
    assert "algorithm.aggregation has no such value: nearest is sequence-sum-constant" in line


def test_the_answer_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "--learning-rate", "1e-6", "--num_generations=8"]) == 2
    said = (
        "podium train: unknown key learning_rate (value 1e-06); did you mean optim.lr?\n"
        "unknown key num_generations (value 8); did you mean sampling.n?\n"
    )
    assert capsys.readouterr().err == said
    page = Path(__file__).parents[3] / "docs" / "coming-from-trl.md"
    assert f"```\npodium train grpo --learning_rate 1e-6 --num_generations 8\n{said}```" in page.read_text()


def test_what_podium_lacks_is_not_called_needless() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, ["--load_in_4bit", "true", "--push_to_hub", "true"])
    lacking, needless = str(caught.value).splitlines()
    assert lacking.startswith(
        "unknown key load_in_4bit (value True): Podium has none: adapters (model.lora.rank) train"
    )
    assert needless.startswith("unknown key push_to_hub (value True): Podium has none and needs none: podium export ")


def test_the_answers_to_a_file_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "trl.yaml"
    path.write_text("max_completion_length: 512\nbeta: 0.04\ngradient_accumulation_steps: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, path)
    first, second, third = str(caught.value).splitlines()
    assert "unknown key max_completion_length (value 512); did you mean sampling.max_new_tokens? 256 by" in first
    assert "did you mean algorithm.kl_coef? set algorithm.kl_in to loss" in second
    assert "gradient_accumulation_steps (value 4): Podium has none and needs none" in third


def test_the_answers_to_a_file_of_verl(tmp_path: Path) -> None:
    """Each setting of an unknown section is answered, whole sections of verl's included."""
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: a.parquet, max_response_length: 64}\n"
        "actor_rollout_ref:\n  model: {path: x}\n  rollout: {n: 8}\n  actor: {optim: {lr: 1e-6}}\n"
        "trainer: {total_training_steps: 10, what_is_this: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, path)
    for theirs, ours in {
        "data.train_files": "data.train",
        "data.max_response_length": "sampling.max_new_tokens",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.rollout.n": "sampling.n",
        "actor_rollout_ref.actor.optim.lr": "optim.lr",
        "trainer.total_training_steps": "run.steps",
    }.items():
        assert f"unknown key {theirs} " in str(caught.value)
        assert f"; did you mean {ours}?" in next(line for line in str(caught.value).splitlines() if theirs in line)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("actor_rollout_ref.rollout.n=8", "write --sampling.n 8"),
        ("+data.train_files=a.parquet", "write --data.train a.parquet"),
        ("++trainer.test_freq=-1", "write --eval.every 0: 0 evaluates before the first and after the last step"),
        (
            "actor.loss_agg_mode=seq-mean-token-mean",
            "write --algorithm.aggregation sequence-mean: each completion counts",
        ),
        ("actor.ppo_mini_batch_size=64", "write --algorithm.minibatches VALUE: it is how many, not how large"),
        ("trainer.balance_batch=True", "Podium has none and needs none: parallel.batching"),
        ("~trainer.del_local_ckpt_after_load", "leave it out"),
        ("~data.shuffle", "leave it out: Podium has none and needs none"),
        ("trainer.logger=['console','wandb']", "write --run.trackers VALUE: a list"),
        ("critic.optim.lr=1e-5", "write --critic.lr 1e-5"),
        ("data.train_files=[a.parquet,b.parquet]", "write --data.train '[a.parquet,b.parquet]'"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", "Podium has none: engines are packages"),
        ("run.steps=3", "write --run.steps 3"),
        ("optim.lrr=3", "write --optim.lr 3"),
        ("a.b=3", "write --section.key value, as in --optim.lr 1e-4"),
        ("steps", "write --section.key value, as in --optim.lr 1e-4"),
    ],
)
def test_a_setting_typed_as_for_hydra_is_answered_as_it_is_typed_here(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, [typed])
    assert str(caught.value).startswith(f"{typed!r} is no setting: {answer}")


def test_all_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Forty overrides need one try: words of Hydra, unknown keys, wrong values and those of the file."""
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {nnodes: 2, what_is_this: 1}\n")
    words = [f"actor_rollout_ref.rollout.{name}=1" for name in ("n", "temperature", "top_p", "top_k", "name")]
    words += ["+trainer.test_freq=5", "~trainer.v1.trainer_mode", "data.max_prompt_length=512"]
    flags = [
        "--gpu_memory_utilization",
        "0.5",
        "--val_before_train",
        "no",
        "--rollout.n",
        "4",
        "--optim.lr",
        "x",
        "--eval.every",
    ]
    assert main(["train", "grpo", "--config", str(path), *words, *flags, "data.shuffle=False"]) == 2
    message = capsys.readouterr().err
    assert message.count(" is no setting: ") == len(words) + 1
    for name in ("gpu_memory_utilization", "val_before_train", "rollout.n", "trainer.nnodes", "trainer.what_is_this"):
        assert f"unknown key {name} " in message
    assert "optim.lr = 'x': expected a number" in message
    assert "--eval.every has no value" in message
    assert len(message.splitlines()) == len(words) + 1 + 7


def test_the_answer_in_python_needs_no_torch() -> None:
    script = (
        "import sys\nfrom podium.errors import ConfigError\nfrom podium.trainer import GRPOConfig\n"
        "try: GRPOConfig(learning_rate=1e-6)\nexcept ConfigError as error: print(error)\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "unknown key learning_rate (value 1e-06); did you mean optim.lr?\n[]\n"


def test_a_section_in_python_answers_with_a_key_of_another_section() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.num_generations \(value 4\); did you mean sampling\.n\?"):
        AlgorithmConfig(num_generations=4)  # pyright: ignore[reportCallIssue] - the mistake under test


def test_a_recipe_answers_with_keys_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size.*did you mean batch\.examples\?"):
        build_config(SFTConfig, {"per_device_train_batch_size": 8})
    with pytest.raises(ConfigError) as caught:
        build_config(InferenceConfig, {"learning_rate": 1e-6})
    assert "optim.lr" not in str(caught.value)


@pytest.mark.parametrize("recipe", [GRPOConfig, SFTConfig])
def test_a_word_that_names_a_key_without_its_section_is_answered_by_this_key(recipe: type[Any]) -> None:
    paths = [key.path for key in keys_of(recipe)]
    for word in {path.rpartition(".")[2] for path in paths}:
        if any(word in table.answers or table.find(word) for table in read_tables()):
            continue  # a project's own setting
        own = [path for path in paths if path.endswith(f".{word}")]
        if not own or any(path == word or path.startswith(f"{word}.") for path in paths):
            continue
        with pytest.raises(ConfigError) as caught:
            build_config(recipe, {word: 1})
        assert any(path in str(caught.value) for path in own), caught.value


def test_options_of_a_component_are_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(name="native", options={"beta": 1}).read_options(NativeOptions)
    assert "kl_coef" not in str(caught.value)
    assert find_equivalent("engine.options.nothing") is None


def test_the_page_shows_what_hydra_words_get(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    words = ["actor_rollout_ref.rollout.n=8", "+trainer.test_freq=-1", "trainer.balance_batch=True"]
    assert main(["train", "grpo", *words]) == 2
    assert f"```\npodium train grpo {' '.join(words)}\n{capsys.readouterr().err}```" in page


def test_the_page_of_openrlhf_shows_what_its_options_get(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-openrlhf.md").read_text()
    words = ["--actor.adam.lr", "1e-6", "--rollout.n_samples_per_prompt", "8", "--train.enable_ema", "true"]
    assert main(["train", "grpo", *words]) == 2
    assert f"```\npodium train grpo {' '.join(words)}\n{capsys.readouterr().err}```" in page


def test_the_overlong_penalty_of_the_page_is_that_of_dapo() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-verl.md").read_text()
    names: dict[str, Any] = {}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "overlong.py" in code), names)
    scores = [names["score"]("= 4", 4, [0] * length)["score"] for length in (1536, 1792, 2048)]
    assert scores == [1.0, 0.5, 0.0]
