"""A setting that another project calls by another name is answered with ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from podium.algorithms import AlgorithmConfig
from podium.cli import main
from podium.config import build_config, keys_of, load_config
from podium.errors import ConfigError
from podium.migration import find_equivalent, read_equivalents
from podium.rollout.engines.config import EngineConfig, VllmOptions
from podium.trainer import GRPOConfig, InferenceConfig, PPOConfig, SFTConfig

TRL = (
    "learning_rate num_generations max_completion_length max_prompt_length beta epsilon epsilon_high delta loss_type "
    "per_device_train_batch_size gradient_accumulation_steps num_iterations steps_per_generation scale_rewards "
    "reward_funcs reward_weights use_vllm vllm_mode max_steps num_train_epochs lr_scheduler_type warmup_ratio "
    "max_grad_norm output_dir run_name report_to save_steps eval_steps logging_steps bf16 gradient_checkpointing "
    "model_name_or_path dataset_name lora_r lora_alpha lora_target_modules use_peft seed temperature "
    "push_to_hub hub_model_id load_best_model_at_end metric_for_best_model eval_on_start mask_truncated_completions "
    "load_in_4bit repetition_penalty min_p sync_ref_model ref_model_sync_steps top_entropy_quantile"
)


def test_every_answer_is_a_key_of_a_recipe() -> None:
    known = tuple(key.path for cls in (GRPOConfig, PPOConfig, SFTConfig) for key in keys_of(cls))
    assert len(read_equivalents()) > 130
    for name, answer in read_equivalents().items():
        assert not answer.key or answer.key.startswith(known), name
        assert not answer.otherwise or answer.otherwise in known, name
        assert answer.key or answer.remark, name
        assert not (answer.key and answer.missing), name
        assert answer.key.rpartition(".")[2] != answer.remark


@pytest.mark.parametrize("name", TRL.split())
def test_a_name_of_trl_is_answered(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, [f"--{name}", "1"])
    answer = read_equivalents()[name]
    lacking = "Podium has none" if answer.missing else "it needs none"
    assert (f"did you mean {answer.key}?" if answer.key else lacking) in str(caught.value)
    assert answer.remark in str(caught.value)


def test_the_answer_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "--learning-rate", "1e-6", "--num_generations=8"]) == 2
    said = (
        "podium train: unknown key learning_rate (value 1e-06): did you mean optim.lr?\n"
        "unknown key num_generations (value 8): did you mean sampling.n?\n"
    )
    assert capsys.readouterr().err == said
    page = Path(__file__).parents[2] / "docs" / "coming-from-trl.md"
    assert f"```\npodium train grpo --learning_rate 1e-6 --num_generations 8\n{said}```" in page.read_text()


def test_what_podium_lacks_is_not_called_needless() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, ["--load_in_4bit", "true", "--push_to_hub", "true"])
    lacking, needless = str(caught.value).splitlines()
    assert lacking.startswith(
        "unknown key load_in_4bit (value True): Podium has none: adapters (model.lora.rank) train"
    )
    assert needless.startswith("unknown key push_to_hub (value True): there is none, and it needs none: podium export ")


def test_the_answers_to_a_file_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "trl.yaml"
    path.write_text("max_completion_length: 512\nbeta: 0.04\ngradient_accumulation_steps: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, path)
    first, second, third = str(caught.value).splitlines()
    assert first.endswith("unknown key max_completion_length (value 512): did you mean sampling.max_new_tokens?")
    assert "did you mean algorithm.kl_coef? set algorithm.kl_in to loss" in second
    assert "gradient_accumulation_steps (value 4): there is none, and it needs none" in third


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
        assert f": did you mean {ours}?" in next(line for line in str(caught.value).splitlines() if theirs in line)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("actor_rollout_ref.rollout.n=8", "write --sampling.n 8"),
        ("+data.train_files=a.parquet", "write --data.train a.parquet"),
        ("run.steps=3", "write --section.key value, as in --optim.lr 1e-4"),
        ("steps", "write --section.key value, as in --optim.lr 1e-4"),
    ],
)
def test_a_setting_typed_as_for_verl_is_answered_as_it_is_typed_here(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, [typed])
    assert str(caught.value) == f"{typed!r} is no setting: {answer}"


def test_the_answer_in_python_needs_no_torch() -> None:
    script = (
        "import sys\nfrom podium.errors import ConfigError\nfrom podium.trainer import GRPOConfig\n"
        "try: GRPOConfig(learning_rate=1e-6)\nexcept ConfigError as error: print(error)\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "unknown key learning_rate (value 1e-06): did you mean optim.lr?\n[]\n"


def test_a_section_in_python_answers_with_a_key_of_another_section() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.num_generations \(value 4\): did you mean sampling\.n\?"):
        AlgorithmConfig(num_generations=4)  # pyright: ignore[reportCallIssue] - the mistake under test


def test_a_recipe_answers_with_keys_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size.*did you mean batch\.examples\?"):
        build_config(SFTConfig, {"per_device_train_batch_size": 8})
    with pytest.raises(ConfigError) as caught:
        build_config(InferenceConfig, {"learning_rate": 1e-6})
    assert "optim.lr" not in str(caught.value)


def test_options_of_a_component_are_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(name="vllm", options={"beta": 1}).read_options(VllmOptions)
    assert "kl_coef" not in str(caught.value)
    assert find_equivalent("engine.options.nothing") is None
