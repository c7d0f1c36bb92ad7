"""``podium config`` writes a configuration that means the same. The scripts have the values of examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium.config import load_config
from podium.runs.config import PPOConfig
from podium.runs.recipes import find_recipe
from tests.integration.training import MODEL, write_copy_task

shell = pytest.importorskip("podium_migration.shell")
conversions = pytest.importorskip("podium_migration.conversion")

LENGTHS = "data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024"
GSM8K = "data.train_files=$HOME/gsm8k/train.parquet data.val_files=$HOME/gsm8k/test.parquet"
VERL = {
    "grpo": """\
#!/usr/bin/env bash
set -xeuo pipefail
MODEL=${MODEL_PATH:-Qwen/Qwen3-8B}    # of the environment, or this one
rows=$((128 * 2))
DATA=(
    algorithm.adv_estimator=grpo
    %(gsm8k)s  %(lengths)s            # both in prompts
    data.filter_overlong_prompts=True
    data.truncation='error'
)
if [ -n "${FAST:-}" ]; then nodes=4; rows=8; else nodes=1; fi
TRAINER=(trainer.logger='["console","wandb"]' trainer.nnodes=${nodes} trainer.n_gpus_per_node=8)
TRAINER+=("trainer.total_epochs=15" trainer.save_freq=20 trainer.test_freq=5)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$rows \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.critic_warmup=0 "${TRAINER[@]}" "$@"
""",
    "ppo": """\
python -m verl.trainer.main_ppo algorithm.adv_estimator=gae %(gsm8k)s %(lengths)s \\
 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat critic.model.path=deepseek-ai/deepseek-llm-7b-chat \\
 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
 critic.optim.lr=1e-5 trainer.critic_warmup=5 trainer.n_gpus_per_node=1 trainer.total_training_steps=100 \\
 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
""",
    "rloo": """\
python -m verl.trainer.main_ppo algorithm.adv_estimator=rloo %(gsm8k)s %(lengths)s \\
 algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 \\
 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
 actor_rollout_ref.rollout.n=5 trainer.total_epochs=15
""",
    "dapo": """\
clip_high=0.28
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo %(gsm8k)s data.train_batch_size=512 \\
 data.max_prompt_length=2048 data.max_response_length=20480 data.truncation='left' \\
 actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=${clip_high} \\
 actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=16 \\
 algorithm.filter_groups.enable=True +algorithm.filter_groups.max_num_gen_batches=10 \\
 actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
 actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
 reward.reward_manager.name=dapo trainer.total_epochs=1 trainer.val_before_train=False
""",
    "gspo": """\
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo %(gsm8k)s %(lengths)s \\
 actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
 actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \\
 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=16 trainer.total_epochs=10
""",
}


def convert(tmp_path: Path, project: str, name: str, text: str, *words: str) -> tuple[Any, dict[str, Any], str]:
    """The checked configuration, its values as they are written, and the text of the file."""
    source, target = tmp_path / name, tmp_path / f"{name}.run.yaml"
    source.write_text(text)
    assert main(["config", "--from", project, str(source), *words, "--output", str(target)]) == 0
    written = target.read_text()
    recipe = written.split("podium train ")[1].split()[0]
    return load_config(find_recipe(recipe).config, target), yaml.safe_load(written), written


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither vllm nor a tracker is installed, and no variable stands in for those of the scripts."""
    monkeypatch.setattr("podium_migration.verl.has_library", lambda name: False)
    monkeypatch.setattr("podium_migration.trl.has_library", lambda name: False)
    monkeypatch.setenv("HOME", "/home/user")
    for name in ("MODEL_PATH", "FAST"):
        monkeypatch.delenv(name, raising=False)


def convert_verl(tmp_path: Path, recipe: str, *words: str) -> tuple[PPOConfig, str]:
    text = VERL[recipe] % {"gsm8k": GSM8K, "lengths": LENGTHS}
    config, _, written = convert(tmp_path, "verl", f"{recipe}.sh", text, *words)
    return config, written


def test_grpo_of_verl(tmp_path: Path) -> None:
    config, text = convert_verl(tmp_path, "grpo")
    assert (config.data.train, config.data.eval) == ("/home/user/gsm8k/train.parquet", "/home/user/gsm8k/test.parquet")
    assert (config.model.path, config.reward.name) == ("Qwen/Qwen3-8B", "gsm8k")
    assert (config.batch.prompts, config.sampling.n, config.algorithm.minibatches) == (1024, 5, 4)
    assert (config.data.max_prompt_tokens, config.sampling.max_new_tokens, config.data.overlong) == (512, 1024, "drop")
    assert (config.optim.lr, config.optim.weight_decay, config.optim.warmup_steps) == (1e-6, 0.01, 40)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.options) == (
        0.2,
        0.2,
        {"dual_clip": 3.0},
    )
    assert (config.algorithm.kl_in, config.algorithm.kl_coef, config.algorithm.kl_estimator) == ("loss", 0.001, "k3")
    assert (config.run.epochs, config.eval.every, config.save.every, config.save.keep) == (15, 5, 20, 0)
    assert config.algorithm.resolve().aggregation == "token-mean"
    assert "1024 / 256, both in prompts" in text
    assert "theirs as 10 at most" in text
    assert "# - trainer.nnodes: the file does not decide this, a condition" in text
    assert "critic_warmup" not in text  # it is off
    assert config.placement.ranks == 1


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_schedule_that_overlaps_halves_has_a_generator_apart(mode: str, tmp_path: Path) -> None:
    """Such a run is refused if the generator reads the policy's own weights."""
    config, _ = convert_verl(tmp_path, "grpo", f"trainer.v1.trainer_mode={mode}")
    assert (config.run.schedule == "sync") == (mode == "sync")
    assert (config.placement.layout == "split") == (mode != "sync")


def test_words_behind_the_file_win_and_decide(tmp_path: Path) -> None:
    config, text = convert_verl(tmp_path, "grpo", "trainer.nnodes=2", "actor_rollout_ref.rollout.n=8")
    assert (config.placement.ranks, config.sampling.n) == (16, 8)
    assert "does not decide" not in text


def test_ppo_of_verl(tmp_path: Path) -> None:
    config, _ = convert_verl(tmp_path, "ppo")
    assert (config.algorithm.advantage, config.algorithm.lam, config.algorithm.value_clip) == ("gae", 1.0, 0.5)
    assert (config.algorithm.kl_in, config.algorithm.kl_coef, config.sampling.n) == ("none", 0, 1)
    assert (config.critic.lr, config.critic.path) == (1e-5, "deepseek-ai/deepseek-llm-7b-chat")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2)
    assert (config.run.steps, config.run.epochs, config.optim.warmup_steps) == (100, None, 40)
    assert config.parallel.micro_batch_tokens == 16 * (512 + 1024)
    assert config.algorithm.options["critic_warmup"] == 4


def test_a_setting_that_belongs_to_another_choice_is_listed(tmp_path: Path) -> None:
    """Of a loss that the run does not take, here; a warm-up of a critic that it does not have."""
    unused = ("actor_rollout_ref.actor.policy_loss.dro_beta=0.3", "trainer.critic_warmup=7")
    _, text = convert_verl(tmp_path, "rloo", *unused)
    assert "# - actor_rollout_ref.actor.policy_loss.dro_beta=0.3: " in text
    assert "# - trainer.critic_warmup=7: " in text


def test_rloo_of_verl(tmp_path: Path) -> None:
    config, _ = convert_verl(tmp_path, "rloo")
    assert config.algorithm.advantage == "rloo"
    assert (config.algorithm.kl_in, config.algorithm.kl_coef, config.algorithm.kl_estimator) == ("reward", 0.001, "k1")
    assert (config.optim.lr, config.algorithm.minibatches, config.sampling.n) == (1e-6, 4, 5)


def test_dapo_of_verl(tmp_path: Path) -> None:
    config, text = convert_verl(tmp_path, "dapo")
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.options) == (
        0.2,
        0.28,
        {"dual_clip": 10.0},
    )
    assert (config.algorithm.minibatches, config.optim.warmup_steps, config.optim.weight_decay) == (16, 160, 0.1)
    assert (config.data.overlong, config.eval.temperature, config.eval.at_start) == ("cut", 1.0, False)
    choice = config.batch.choice
    assert (choice.count, choice.filter, choice.refills) == (512, "rewards", 9), "the first draw is one of ten"
    assert "filter_groups" not in text and "at most 10 draws, and ends the run" in text.replace("\n", " ").replace(
        "# ", ""
    )
    assert "# - reward.reward_manager.name=dapo: dapo: a function of yours" in text


SEQUENCE_FILTER = (
    "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_reward "
    "algorithm.filter_groups.max_num_gen_batches=1"
)


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", (64, "accuracy", 1000)),
        (SEQUENCE_FILTER, (64, "rewards", 0)),
        ("algorithm.filter_groups.enable=False algorithm.filter_groups.max_num_gen_batches=5", (64, "none", 3)),
    ],
)
def test_dynamic_sampling_of_verl(settings: str, choice: tuple[Any, ...], tmp_path: Path) -> None:
    script = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files='[a.parquet, b.parquet]' "
        "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.model.path=m "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=True "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6 "
        f"actor_rollout_ref.rollout.val_kwargs.n=8 actor_rollout_ref.rollout.val_kwargs.top_p=0.95 {settings}\n"
    )
    config, _, _ = convert(tmp_path, "verl", "run.sh", script)
    taken, sampling = config.batch.choice, config.eval.sampling
    assert (taken.count, taken.filter) == choice[:2]
    assert taken.filter == "none" or taken.refills == choice[2]
    assert list(config.data.train) == ["a.parquet", "b.parquet"]
    assert (sampling.temperature, sampling.n, sampling.top_p, sampling.top_k) == (0.6, 8, 0.95, 0)


def test_gspo_of_verl(tmp_path: Path) -> None:
    config, _ = convert_verl(tmp_path, "gspo")
    assert (config.algorithm.loss, config.algorithm.clip_low, config.algorithm.clip_high) == ("gspo", 3e-4, 4e-4)
    assert config.algorithm.resolve().aggregation == "sequence-mean"
    assert config.algorithm.options == {}


def test_yaml_of_verl(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {rollout: {n: 4}, actor: {optim: {lr: 1e-6}}}\nalgorithm: {adv_estimator: grpo}\n"
    config, _, _ = convert(tmp_path, "verl", "verl.yaml", text)
    assert (config.sampling.n, config.optim.lr, config.batch.prompts) == (4, 1e-6, 1024)


def test_a_setting_of_a_newer_verl_is_named(tmp_path: Path) -> None:
    _, _, text = convert(
        tmp_path,
        "verl",
        "a.sh",
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=rloo algorithm.brand_new=3 "
        "actor_rollout_ref.rollout.n=2",
    )
    assert "# - algorithm.brand_new=3: the table of verl 0.9.1 has no such setting" in text


TRL_SCRIPT = """\
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

N = 8

def accuracy(completions, solution, **kwargs):
    return [float(text == right) for text, right in zip(completions, solution)]

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig(
    output_dir="out/grpo", num_generations=N, max_completion_length=1024, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, steps_per_generation=8, learning_rate=1e-5, beta=0.04, loss_type="dr_grpo",
    max_steps=400, warmup_steps=0.1, mask_truncated_completions=True, logging_steps=int(5),
)
peft = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B", args=args, reward_funcs=[accuracy], train_dataset=dataset, peft_config=peft
)
"""


def test_grpo_of_trl(tmp_path: Path) -> None:
    config, _, text = convert(tmp_path, "trl", "train.py", TRL_SCRIPT)
    assert (config.model.path, config.data.train) == ("Qwen/Qwen3-0.6B", "trl-lib/DeepMath-103K")
    assert config.reward.name == f"{tmp_path / 'train.py'}:accuracy"
    assert (config.batch.prompts, config.sampling.n, config.algorithm.minibatches) == (8, 8, 4)  # 8 x 8 rows, 16 a step
    assert (config.run.steps, config.optim.warmup_steps, config.optim.lr) == (100, 40, 1e-5)
    assert (config.optim.lr_schedule, config.model.gradient_checkpointing) == ("linear", True)
    assert (config.algorithm.kl_in, config.algorithm.kl_coef, config.algorithm.cut_off) == ("loss", 0.04, "leave_out")
    assert (config.algorithm.advantage, config.algorithm.clip_high) == ("grpo", 0.2)
    assert config.algorithm.normalize_advantage is True, "scale_rewards is group by default"
    assert config.algorithm.resolve().aggregation == "sequence-sum-constant"
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.targets) == (32, 64.0, ())
    assert (config.run.dir, config.run.name, config.eval.items, config.data.holdout) == ("out", "grpo", 0, 0)
    assert "the file names no number of processes, and 1 is assumed" in text


def test_gspo_of_trl_by_options(tmp_path: Path) -> None:
    text = """\
accelerate launch --num_processes 4 examples/scripts/grpo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5 --dtype bfloat16 --use_vllm --report_to trackio \\
    --max_completion_length 1024 --use_peft --lora_target_modules "q_proj", "v_proj" --log_completions \\
    --per_device_train_batch_size 8 --num_generations 8 --importance_sampling_level sequence --epsilon 3e-4 \\
    --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8
"""
    config, _, written = convert(tmp_path, "trl", "run.sh", text)
    assert (config.algorithm.loss, config.algorithm.clip_low, config.algorithm.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (config.batch.prompts, config.algorithm.minibatches, config.placement.ranks) == (32, 4, 4)
    assert (config.run.epochs, config.model.dtype) == (3.0, "bfloat16")
    assert config.model.lora is not None
    assert config.model.lora.targets == ("q_proj", "v_proj")
    assert (config.algorithm.kl_in, config.algorithm.normalize_advantage) == ("none", True)
    assert "# - use_vllm=True: vllm is not installed here" in written
    assert "# - report_to=trackio" in written


def test_sft_of_trl_by_yaml(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen2-0.5B\ndataset_name: trl-lib/Capybara\nlearning_rate: 2.0e-4\npacking: true\n"
        "num_train_epochs: 1\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\neval_strategy: steps\n"
        "eval_steps: 100\nsave_steps: 50\n"
    )
    config, _, _ = convert(tmp_path, "trl", "sft.yaml", text)
    assert (config.batch.examples, config.run.epochs, config.optim.lr) == (16, 1, 2e-4)
    assert (config.optim.lr_schedule, config.parallel.batching) == ("linear", "packed")
    assert (config.eval.every, config.save.every, config.eval.at_start) == (100, 50, False)


def test_dpo_and_reward_models_of_trl(tmp_path: Path) -> None:
    text = "from trl import DPOConfig\nargs = DPOConfig(beta=0.2, loss_type=['ipo'], num_train_epochs=1)\n"
    config, _, _ = convert(tmp_path, "trl", "dpo.py", text)
    assert (config.algorithm.loss, config.algorithm.options, config.optim.lr) == ("ipo", {"beta": 0.2}, 1e-6)
    config, values, _ = convert(tmp_path, "trl", "rm.py", "RewardConfig(center_rewards_coefficient=0.01)\n")
    assert "sampling" not in values
    assert (config.algorithm.options, config.optim.lr, config.batch.examples) == ({"center": 0.01}, 1e-4, 8)


def test_names_of_a_script_are_functions_imports_or_undecided(tmp_path: Path) -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nfrom trl.rewards import accuracy_reward\nfrom mine import score\n"
        "def main():\n    model = load()\n    GRPOTrainer(model=model, reward_funcs=[accuracy_reward, score])\n"
        "data = load_dataset('a/b', split=['train[:5%]', 'test'])\nGRPOConfig(num_generations=4)\n"
    )
    config, _, written = convert(tmp_path, "trl", "a.py", text)
    assert (config.reward.name, config.model.path, config.data.train) == (("math", "mine:score"), "MODEL", "a/b")
    assert "# - model_name_or_path: the file does not decide this" in written
    assert "data.train_split is the name of one split" in written.replace("\n#   ", " ")


SCRIPT_OF_UNSLOTH = """\
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
longest, longest_prompt = 1024, 256
most = 1024
def right(completions, **kwargs): ...
def short(completions, **kwargs): ...
args = GRPOConfig(
    adam_beta1=0.9, adam_beta2=0.99, optim="paged_adamw_8bit", max_completion_length=most - 256, num_generations=4,
    max_steps=300, save_steps=0.1, eval_strategy="steps", eval_steps=0.25, reward_weights=[2.0, 0.5],
    multi_objective_aggregation="normalize_then_sum", shuffle_dataset=False, model_init_kwargs={"dtype": "bfloat16"},
)
GRPOTrainer(model="m", args=args, reward_funcs=[right, short], peft_config=LoraConfig(r=64))
"""


def test_what_a_script_says_is_converted_by_its_own_meaning(tmp_path: Path) -> None:
    """Defaults of LoraConfig are peft's, intervals below 1 are shares, and both decay rates count."""
    config, _, written = convert(tmp_path, "trl", "a.py", SCRIPT_OF_UNSLOTH)
    assert config.optim.betas == (0.9, 0.99)
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.dropout) == (64, 8.0, 0.0)
    assert (config.save.every, config.eval.every, config.sampling.max_new_tokens) == (30, 75, 768)
    assert (config.algorithm.advantage, config.reward.weights) == ("gdpo", ())
    assert config.algorithm.options["part_weights"] == {"right": 2.0, "short": 0.5}
    assert config.model.dtype == "bfloat16"
    assert "# - optim=paged_adamw_8bit: the optimizer is AdamW with its state" in written
    assert "# - shuffle_dataset=False: each pass over the data has an order of its own" in written
    assert "# - lora_target_modules: where no layers are named, peft adapts some by the type" in written
    _, _, written = convert(tmp_path, "trl", "b.yaml", "num_generations: 8\nsave_steps: 0.1\neval_strategy: epoch\n")
    assert "# - eval_strategy=epoch: eval.every counts steps" in written
    assert "# - save_steps=0.1: save.every counts steps: 0.1 x those of the run" in written


def test_fine_tuning_says_what_is_learned_of_a_conversation(tmp_path: Path) -> None:
    _, _, written = convert(tmp_path, "trl", "sft.yaml", "packing: true\n")
    assert "# - assistant_only_loss: podium train sft learns the assistant's turns" in written
    _, _, written = convert(tmp_path, "trl", "b.yaml", "packing: true\nassistant_only_loss: true\n")
    assert "assistant_only_loss" not in written
    text = "packing: true\nassistant_only_loss: true\ncompletion_only_loss: false\n"
    _, _, written = convert(tmp_path, "trl", "c.yaml", text)
    assert "# - completion_only_loss=False: of a prompt and its completion" in written


def test_lengths_and_the_critic_of_verl_that_differ_are_named(tmp_path: Path) -> None:
    words = (
        "actor_rollout_ref.rollout.response_length=96",
        "actor_rollout_ref.rollout.prompt_length=48",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "critic.ppo_epochs=1",
    )
    config, written = convert_verl(tmp_path, "ppo", *words)
    assert config.sampling.max_new_tokens == 96
    assert "# - actor_rollout_ref.rollout.prompt_length=48: prompts have one bound" in written
    lines = [line for line in written.replace("\n#   ", " ").splitlines() if "only critic.lr and critic.path" in line]
    assert "critic.ppo_epochs=1" in lines[0] and "critic.optim.weight_decay" in lines[0]
    (tmp_path / "other").mkdir()
    _, written = convert_verl(tmp_path / "other", "ppo")
    assert "critic.ppo_epochs" not in written and "critic.optim.weight_decay" not in written


NEED_ANOTHER = {  # settings that change nothing in their project either, while another one has its default
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "vllm_importance_sampling_correction",
    "disable_dropout",
    "algorithm.norm_adv_by_std_in_grpo",
}


@pytest.mark.parametrize("project", ["TRL", "verl"])
def test_no_setting_with_a_counterpart_vanishes(project: str) -> None:
    """Each changes the configuration or is listed, whatever its computation is: with one value that is not usual."""
    table = next(table for table in conversions.read_tables() if table.project == project)
    base = {"num_generations": 4, "max_steps": 100} if project == "TRL" else {"data.train_batch_size": 64}
    vanished = []
    for name, answer in table.answers.items():
        computed = answer.key and (answer.rule or answer.group) and answer.group != "same"
        if not computed or "*" in name or name in NEED_ANOTHER:
            continue
        values = {**base, name: _find_unusual(answer)}
        before, after = (_convert_values(project, values) for values in (base, values))
        if after is not None and before == after:
            vanished.append(name)
    assert vanished == []


def _find_unusual(answer: Any) -> Any:
    default = answer.default.get("grpo") if isinstance(answer.default, dict) and answer.default else answer.default
    if answer.values:
        return next((value for value in list(answer.values)[::-1] if value not in (str(default).lower(), default)), 7)
    return not default if isinstance(default, bool) else 96 if isinstance(default, int | float) else "unusual"


def _convert_values(project: str, values: dict[str, Any], recipe: str = "grpo", whole: bool = False) -> Any:
    """Values, notes and lines of a conversion, or the ``whole`` of it. None where it refuses the value."""
    module = pytest.importorskip(f"podium_migration.{project.lower()}")
    settings = pytest.importorskip("podium_migration.sources").Settings(dict(values), [], recipe, 1)
    try:
        conversion = getattr(module, f"convert_{project.lower()}")(settings)
    except (ValueError, TypeError):
        return None
    return conversion if whole else (conversion.values, conversion.notes, conversion.lost)


BASES = {  # settings that a recipe needs
    ("TRL", "grpo"): {"num_generations": 4, "max_steps": 100},
    ("TRL", "sft"): {"max_steps": 100},
    ("TRL", "dpo"): {"max_steps": 100},
    ("TRL", "reward"): {"max_steps": 100},
    ("verl", "gae"): {"algorithm.adv_estimator": "gae", "data.train_batch_size": 64},
    ("verl", "grpo"): {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 64},
}


@pytest.mark.everyday("verl-grpo", "TRL-grpo")
@pytest.mark.parametrize(("project", "recipe"), BASES)
def test_no_value_without_a_key_vanishes(project: str, recipe: str) -> None:
    """In each recipe: what Podium lacks, and values for which it needs no setting while others are lacking."""
    table = next(table for table in conversions.read_tables() if table.project == project)
    keys = _convert_values(project, BASES[project, recipe], recipe, whole=True).defaults
    vanished = []
    for name, answer in table.answers.items():
        chosen = answer.choose(keys) or answer
        if chosen.key or "*" in name or not (chosen.missing or chosen.holds or answer.key):
            continue
        values = {**BASES[project, recipe], name: "unusual"}
        lines = _convert_values(project, values, recipe, whole=True).lost
        if not any(line.startswith(f"{name}=unusual: ") for line in lines):
            vanished.append(name)
    assert vanished == []


def test_an_answer_of_another_recipe_without_a_key_says_which_values_hold() -> None:
    """In every table: otherwise no conversion could tell a value that Podium lacks."""
    for table in conversions.read_tables():
        for name, answer in table.answers.items():
            for other in answer.otherwise:
                assert other.key or other.missing or other.holds, f"{table.project}: {name}"


def test_cispo_of_trl_has_the_bound_itself(tmp_path: Path) -> None:
    config, _, _ = convert(tmp_path, "trl", "a.py", "GRPOConfig(loss_type='cispo', epsilon_high=5.0)\n")
    assert (config.algorithm.loss, config.algorithm.clip_low, config.algorithm.clip_high) == ("cispo", None, 4.0)


@pytest.mark.parametrize(
    "recipe", ["grpo", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ppo", "rloo", "dapo", "gspo"))]
)
def test_the_configuration_passes_the_dry_run(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model and data in place of those of the script, which are not here."""
    convert_verl(tmp_path, recipe)
    data = str(write_copy_task(tmp_path))
    words = [
        "--data.train",
        data,
        "--data.eval",
        data,
        "--model.path",
        "",
        "--critic.path",
        "",
        "--placement.ranks",
        "1",
    ]
    model = ["--model.config", json.dumps(MODEL["config"]), "--model.tokenizer", str(MODEL["tokenizer"])]
    lengths = ["--data.max_prompt_tokens", "4", "--sampling.max_new_tokens", "3", "--reward.name", "exact"]
    command = ["train", "ppo" if recipe == "ppo" else "grpo", "--config", str(tmp_path / f"{recipe}.sh.run.yaml")]
    assert main([*command, *words, *model, *lengths, "--parallel.strategy", "replicate", "--dry-run"]) == 0
    assert "1,024 prompts" in capsys.readouterr().out or recipe == "dapo"


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "empty.sh": ("verl", "echo hello\n", "gives no setting of verl"),
        "bad.yaml": ("trl", "a: [1", "is not valid YAML"),
        "bad.py": ("trl", "def (", "is no Python"),
        "other.py": ("trl", "print(1)\n", "gives no setting of TRL"),
        "rloo.py": (
            "trl",
            "from trl import RLOOConfig\nRLOOConfig(beta=1)\n",
            "it is podium train grpo with algorithm.advantage rloo",
        ),
        "kto.py": ("trl", "from trl import KTOTrainer\nKTOTrainer(m)\n", "podium train dpo with algorithm.loss kto"),
        "prm.py": (
            "trl",
            "from trl import PRMTrainer\nPRMTrainer(m)\n",
            "PRMTrainer, which is not converted: Podium",
        ),
        "which.yaml": ("trl", "learning_rate: 1e-5\n", "does not say which trainer of TRL"),
    }
    for name, (project, text, message) in cases.items():
        (tmp_path / name).write_text(text)
        assert main(["config", "--from", project, str(tmp_path / name), "--output", str(tmp_path / "run.yaml")]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("kept")
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-5\nnum_generations: 8\n")
    assert main(["config", "--from", "trl", str(tmp_path / "a.yaml"), "--output", str(tmp_path / "run.yaml")]) == 2
    assert "exists: name another file by --output" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1\nrun x=$a y=${b:-2} z=${c}", ["x=1", "y=2", "z="]),
        ('run \'x=$a\' "y=\\"q\\"" z=a\\ b', ["x=$a", 'y="q"', "z=a b"]),
        ('A=(p q)\nA+=(r)\nrun "${A[@]}" ${A[0]:-none}', ["p", "q", "r"]),
        ("run x=$((2 * (3 + 4))) y=$(date) z=`id`", ["x=14", "y=\0", "z=\0"]),
        ("if true; then a=1; fi\nrun x=$a # y=2", ["x=\0"]),
        ("case $x in\n  a) b=1 ;;\n  *) b=2 ;;\nesac\nb=3\nrun x=$b", ["x=3"]),
        ("f() {\n  run y=1\n}\nrun x=1 && run2", ["x=1"]),
        ("export a=5; run x=${a}", ["x=5"]),
        ("run x='a b' \\\n  y=2", ["x=a b", "y=2"]),
    ],
)
def test_a_shell_script_is_read_without_being_run(text: str, words: list[str]) -> None:
    commands = shell.read_script(text, {}).commands
    assert next(command[1:] for command in commands if command[0] == "run")[: len(words)] == words


def test_what_recipes_give_beyond_the_generated_configuration(tmp_path: Path) -> None:
    text = (
        "python -m verl.trainer.main_ppo model_engine=dp actor_rollout_ref.rollout.n=4 data.train_batch_size=4 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=4 algorithm.adv_estimator=grpo trainer.nnodes=8 "
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4 +reward.reward_kwargs.max_resp_len=8 "
        "actor_rollout_ref.actor.megatron.context_parallel_size=4 actor_rollout_ref.actor.megatron.grad_offload=True"
    )
    config, _, written = convert(tmp_path, "verl", "a.sh", text)
    assert (config.algorithm.loss, config.algorithm.clip_low, config.placement.ranks) == ("cispo", 1.0, 16)
    assert "engine_kwargs.vllm.swap_space=4: engines are packages" in written.replace("\n#   ", " ")
    assert "reward.reward_kwargs.max_resp_len=8: a function of the completion" in written.replace("\n#   ", " ")
    assert "has no such setting" not in written
    lines = [line for line in written.replace("\n#   ", " ").splitlines() if "context_parallel_size=4" in line]
    assert "grad_offload=True" in lines[0]  # one line for one reason


def test_settings_that_cannot_be_trained_with_say_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.sh").write_text("python -m verl.trainer.main_ppo algorithm.adv_estimator=rloo data.shuffle=True")
    words = ["config", "--from", "verl", "--output", str(tmp_path / "b.yaml"), str(tmp_path / "a.sh")]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "sampling.n = 1 with algorithm.advantage = 'rloo'" in message
    assert message.endswith("give others behind the file, as NAME=VALUE of verl\n")
    assert main([*words, "actor_rollout_ref.rollout.n=4"]) == 0


def test_a_generated_configuration_of_verl_refers_to_other_settings(tmp_path: Path) -> None:
    text = (
        "data: {train_batch_size: 64, max_prompt_length: 100, tokenizer: null, train_files: '${oc.env:FILES}'}\n"
        "actor_rollout_ref:\n"
        "  actor: {ppo_mini_batch_size: '${data.train_batch_size}', optim: {lr_scheduler_type: constant}}\n"
        "  rollout: {name: '???', n: '${oc.select:a.b,4}', temperature: '${.top_p}', top_p: 0.9, "
        "prompt_length: '${oc.select:data.max_prompt_length,512}'}\n"
        "trainer: {total_training_steps: null}\nalgorithm: {adv_estimator: rloo}\n"
    )
    config, _, written = convert(tmp_path, "verl", "verl.yaml", text)
    assert (config.batch.prompts, config.algorithm.minibatches, config.sampling.n) == (64, 1, 4)
    assert (config.sampling.temperature, config.sampling.top_p, config.run.epochs) == (0.9, 0.9, 30)
    assert "# - data.train_files: the file does not decide this" in written


RLOO, KTO = "algorithm.advantage rloo", "podium train dpo with algorithm.loss kto"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "trl rloo --model_name_or_path q --num_generations 8\n", RLOO),
        ("a.sh", "accelerate launch --num_processes 2 -m trl.scripts.rloo --num_generations 8\n", RLOO),
        ("a.sh", "python examples/scripts/rloo/rloo.py --num_generations 8\n", RLOO),
        ("a.sh", "python trl/scripts/kto.py --beta 0.1\n", KTO),
        ("a.sh", "python examples/scripts/dpo_online.py --beta 0.1\n", "OnlineDPOTrainer, which is not converted"),
        ("a.yaml", "num_generations: 8\nreward_clip_range: [-10, 10]\n", RLOO),
        ("a.yaml", "beta: 0.1\ndesirable_weight: 1.3\n", KTO),
        ("a.py", "import trl\ntrl.RLOOConfig(num_generations=4)\n", RLOO),
        ("a.py", "from trl import RLOOConfig as C\nC(num_generations=4)\n", RLOO),
        ("a.py", "from trl import SFTConfig, KTOConfig\nSFTConfig(packing=True)\nKTOConfig(beta=1)\n", KTO),
        ("a.py", "from trl import SFTConfig, GRPOConfig\nSFTConfig()\nGRPOConfig(beta=1)\n", "SFTTrainer, GRPOTrainer"),
        ("a.sh", "trl sft --packing true\ntrl grpo --beta 0.1\n", "SFTTrainer, GRPOTrainer"),
        ("a.sh", "trl grpo --config missing.yaml --beta 0.1\n", "takes settings from the file missing.yaml"),
    ],
)
def test_other_trainers_of_trl_are_refused_in_each_form_of_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["config", "--from", "trl", str(tmp_path / name), "--output", str(tmp_path / "run.yaml")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


def test_files_of_settings_that_a_script_names_are_read(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 6\nbeta: 0.02\nlearning_rate: 3.0e-6\n")
    _, values, _ = convert(tmp_path, "trl", "a.sh", "trl grpo --config grpo.yaml --beta 0.5\n")
    assert (values["sampling"]["n"], values["algorithm"]["kl_coef"], values["optim"]["lr"]) == (6, 0.5, 3e-6)

    (tmp_path / "serve.yaml").write_text("num_generations: 2\n")
    for file in ("serve.yaml", "missing.yaml"):
        script = f"trl vllm-serve --config {file} &\ntrl grpo --config grpo.yaml\npython push.py --config {file}\n"
        _, values, _ = convert(tmp_path, "trl", f"{file}.sh", script)
        assert values["sampling"]["n"] == 6

    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer]\nactor_rollout_ref: {rollout: {n: 6, top_k: 5}}\n")
    command = "python3 -m verl.trainer.main_ppo {} data.train_batch_size=8 actor_rollout_ref.rollout.top_k=7\n"
    _, values, _ = convert(tmp_path, "verl", "b.sh", command.format("--config-name mine"))
    assert (values["sampling"]["n"], values["sampling"]["top_k"]) == (6, 7)
    _, _, written = convert(tmp_path, "verl", "c.sh", command.format("--config-path=$X --config-name='other'"))
    assert "--config-name=other: this file of settings" in written
    _, _, written = convert(tmp_path, "verl", "d.sh", command.format("--config-name='ppo_trainer.yaml'"))
    assert "--config-name" not in written


def test_a_guess_of_the_trainer_is_told_where_others_have_the_setting(tmp_path: Path) -> None:
    _, _, written = convert(tmp_path, "trl", "a.yaml", "num_generations: 8\nbeta: 0.05\n")
    assert "RLOOTrainer has this setting, too" in written.replace("\n#  ", "")
    _, _, written = convert(tmp_path, "trl", "b.sh", "python -m trl.scripts.grpo --num_generations 8\n")
    assert "RLOOTrainer" not in written
    command = "accelerate launch --num_processes 2 --module trl.scripts.grpo --num_generations 8\n"
    _, _, written = convert(tmp_path, "trl", "d.sh", command)
    assert "RLOOTrainer" not in written and "module" not in written and "num_processes" not in written
    _, values, _ = convert(
        tmp_path,
        "trl",
        "c.py",
        "from trl import GRPOConfig as C, ModelConfig\nModelConfig(model_name_or_path='q')\nC()\n",
    )
    assert values["model"]["path"] == "q"
