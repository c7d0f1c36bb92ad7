"""The configuration that ``podium config --from trl`` writes trains as TRL does, or says where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium.config import load_config
from podium.runs.recipes import find_recipe

model_types = pytest.importorskip("podium_migration.model_types")


def convert(tmp_path: Path, name: str, text: str, *words: str) -> tuple[Any, dict[str, Any], str]:
    """The checked configuration, its values as they are written, and the text of the file."""
    source, target = tmp_path / name, tmp_path / f"{name}.run.yaml"
    source.write_text(text)
    assert main(["config", "--from", "trl", str(source), *words, "--output", str(target)]) == 0
    written = target.read_text()
    recipe = written.split("podium train ")[1].split()[0]
    return load_config(find_recipe(recipe).config, target), yaml.safe_load(written), written


@pytest.mark.everyday("Qwen/Qwen3-0.6B-targets0", "gpt_neox-targets2")
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("Qwen/Qwen3-0.6B", ("q_proj", "v_proj")),
        ("meta-llama/Llama-3.1-8B", ("q_proj", "v_proj")),
        ("gpt_neox", ("query_key_value",)),
        ("Qwen/Qwen3-30B-A3B", ()),  # its type has no entry in peft's table
        ("other/model", ()),
        ("gemma4", ()),  # peft has a pattern
    ],
)
def test_adapters_without_layers_are_those_of_peft(
    model: str, targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium_migration.model_types._find_cached", lambda name: None)
    if "/" not in model:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model}))
        model = str(tmp_path / "model")
    script = f"GRPOTrainer(model={model!r}, args=GRPOConfig(), peft_config=LoraConfig(r=4))\n"
    config, _, written = convert(tmp_path, "a.py", script)
    assert config.model.lora is not None
    assert config.model.lora.targets == targets
    assert ("# - lora_target_modules: " in written) == (not targets)
    text = f"model_name_or_path: {model}\nnum_generations: 8\nuse_peft: true\n"
    config, _, written = convert(tmp_path, "a.yaml", f"{text}lora_target_modules: [all-linear]\n")
    assert config.model.lora is not None
    assert config.model.lora.targets == ()
    assert "lora_target_modules" not in written


def test_the_models_whose_names_say_their_type_are_in_the_table_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for kind in model_types._FAMILIES:
        assert model_types.read_peft_targets(kind) == table[kind]


def test_packed_rows_of_trl_are_no_examples(tmp_path: Path) -> None:
    text = "packing: true\nmax_length: 4096\nper_device_train_batch_size: 4\n"
    _, _, written = convert(tmp_path, "a.yaml", text)
    assert "# - packing=True: TRL puts examples together into rows of max_length tokens (4096)" in written
    assert "examples each: see below.\n  examples: 4" in written
    _, _, written = convert(tmp_path, "b.yaml", "packing: false\nper_device_train_batch_size: 4\n")
    assert "packing" not in written and "see below" not in written


@pytest.mark.parametrize(
    ("scale", "advantage", "normalizes"),
    [
        ("", "grpo", True),
        ("scale_rewards: group\n", "grpo", True),
        ("scale_rewards: true\n", "grpo", True),
        ("scale_rewards: batch\n", "grpo", None),
        ("scale_rewards: none\n", "dr_grpo", None),
        ("scale_rewards: false\n", "dr_grpo", None),
    ],
)
def test_dr_grpo_of_trl_scales_rewards_unless_it_is_set(
    scale: str, advantage: str, normalizes: bool | None, tmp_path: Path
) -> None:
    config, _, written = convert(tmp_path, "a.yaml", f"num_generations: 8\nloss_type: dr_grpo\n{scale}")
    assert (config.algorithm.advantage, config.algorithm.normalize_advantage) == (advantage, normalizes)
    assert config.algorithm.resolve().aggregation == "sequence-sum-constant"
    assert ("# - scale_rewards=batch: " in written) == ("batch" in scale)


SCRIPT_WITH_CHANGES = """\
from datasets import concatenate_datasets, load_dataset
import datasets
from trl import GRPOConfig, GRPOTrainer

def prepare(rows, name):
    rows = rows.map(lambda row: {"prompt": SYSTEM + row["question"].strip()})
    return rows.rename_column("solution", "answer")

def load():
    return load_dataset("openai/gsm8k", "main")["train"]

class Mine(GRPOTrainer): ...

data = load().filter(lambda row: len(row["question"]) < 500)
parts = prepare(data, name="a").shuffle(seed=1).train_test_split(0.1)
for split in parts:
    parts[split] = parts[split].select(range(100))
more = concatenate_datasets([parts["train"], datasets.Dataset.from_list([])])
print(", ".join(data[0]["question"].split()), "x".join(map(str, filter(None, data.column_names))))
tokenizer.chat_template = "{{ messages }}"
settings = dict(num_generations=4, beta=0.1)
args = GRPOConfig(epsilon=0.1, **settings, **more_settings)
args.beta = 0.3
trainer = GRPOTrainer("q", score, args=args, train_dataset=more, callbacks=[Stop()], ref_model=None)
"""


def test_what_a_script_does_beside_its_settings_is_listed(tmp_path: Path) -> None:
    config, values, written = convert(tmp_path, "a.py", SCRIPT_WITH_CHANGES)
    lines = written.replace("\n#   ", " ").splitlines()
    (rows,) = [line for line in lines if "the script changes rows or columns here" in line]
    assert rows.removeprefix("# - ").partition(": ")[0].split(", ") == [
        *("rows.map (line 6)", "rows.rename_column (line 7)", "load.filter (line 14)", "prepare.shuffle (line 15)"),
        *("prepare.train_test_split (line 15)", "parts.select (line 17)", "Dataset.from_list (line 18)"),
        "concatenate_datasets (line 18)",
    ]
    assert any(line.startswith("# - Mine (line 12): a trainer of the script's own") for line in lines)
    assert any(line.startswith("# - tokenizer.chat_template (line 20): ") for line in lines)
    assert any(line.startswith("# - callbacks (line 24): ") for line in lines)
    assert any("**more_settings" in line and "the file does not decide this" in line for line in lines)
    assert "ref_model" not in written
    assert values["data"]["options"] == {"name": "main"}
    assert (config.model.path, config.data.train, config.sampling.n) == ("q", "openai/gsm8k", 4)
    assert (config.algorithm.kl_coef, config.algorithm.clip_low) == (0.3, 0.1)


def test_a_script_that_changes_no_rows_has_no_such_lines(tmp_path: Path) -> None:
    text = "data = load_dataset('a/b')\nprint(data[0]['prompt'].split())\nGRPOTrainer(args=GRPOConfig(), train_dataset="
    text += "data)\n"
    _, _, written = convert(tmp_path, "train.py", text)
    assert "the script changes rows" not in written and "(line" not in written


def test_a_setting_behind_a_script_decides_what_the_script_does_not(tmp_path: Path) -> None:
    text = "GRPOConfig(learning_rate=find_rate(), num_generations=4)\n"
    config, _, written = convert(tmp_path, "a.py", text, "learning_rate=3e-6")
    assert config.optim.lr == 3e-6
    assert "does not decide" not in written


DEFAULTS_OF_TRL = {  # of transformers' TrainingArguments, which all recipes have, and of each recipe
    "": {
        **{"optim.lr_schedule": "linear", "optim.warmup_steps": 0, "optim.weight_decay": 0.0, "optim.grad_clip": 1.0},
        **{"optim.betas": (0.9, 0.999), "optim.eps": 1e-8, "run.epochs": 3.0, "model.gradient_checkpointing": True},
        **{"model.dtype": "float32", "parallel.precision": "auto", "model.lora": None, "data.holdout": 0.0},
        **{"eval.items": 0, "data.train_split": "train"},
    },
    "GRPO": {
        **{"optim.lr": 1e-6, "sampling.n": 8, "sampling.max_new_tokens": 512, "sampling.temperature": 1.0},
        **{"sampling.top_p": 1.0, "sampling.top_k": 0, "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2},
        **{"algorithm.kl_in": "none", "algorithm.advantage": "grpo", "algorithm.normalize_advantage": True},
        **{"algorithm.loss": "ppo_clip", "algorithm.aggregation": "token-mean", "algorithm.cut_off": "learn"},
        **{"algorithm.epochs": 1, "algorithm.minibatches": 1, "batch.prompts": 1, "algorithm.entropy_coef": 0.0},
        **{"algorithm.correction": "auto", "run.schedule": "sync", "algorithm.options": {}},
    },
    "SFT": {"optim.lr": 2e-5, "batch.examples": 8, "model.dropout": None},
    "DPO": {"optim.lr": 1e-6, "batch.examples": 8, "algorithm.loss": "dpo", "algorithm.options": {}},
    "Reward": {"optim.lr": 1e-4, "batch.examples": 8, "algorithm.options": {}},
}
EXPLAINED_DEFAULTS = {
    "GRPO": "max_prompt_length",
    "SFT": "assistant_only_loss",
    "DPO": "max_length",
    "Reward": "max_length",
}


@pytest.mark.parametrize("trainer", EXPLAINED_DEFAULTS)
def test_a_script_without_settings_trains_with_the_defaults_of_trl(trainer: str, tmp_path: Path) -> None:
    text = f"{trainer}Trainer(model='Qwen/Qwen3-0.6B', args={trainer}Config(), train_dataset=load_dataset('a/b'))\n"
    config, _, written = convert(tmp_path, "a.py", text)
    for key, value in {**DEFAULTS_OF_TRL[""], **DEFAULTS_OF_TRL[trainer]}.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == value, key
    for name in ("per_device_train_batch_size", "prompts", EXPLAINED_DEFAULTS[trainer]):
        assert f"# - {name}: " in written
    assert "disable_dropout" not in written  # Qwen has none
    _, _, written = convert(tmp_path, "b.py", text.replace("Qwen/Qwen3-0.6B", "gpt2"))
    assert ("# - disable_dropout: " in written) == (trainer == "GRPO")


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ("bf16: false", "parallel.precision", "float32"),
        ("bf16: true", "parallel.precision", "bfloat16"),
        ("bf16: false\nfp16: true", "parallel.precision", "float16"),
        ("disable_dropout: false", "model.dropout", True),
        (
            "use_adaptive_entropy: true",
            "algorithm.entropy_coef",
            {"target": 0.2, "delta": 0.005, "min": 0.0, "max": 1.0, "start": 0.0},
        ),
        ("entropy_coef: 0.01\nentropy_target: 0.3", "algorithm.entropy_coef", 0.01),
        (
            "sync_ref_model: true\nbeta: 0.1\nnum_iterations: 2",
            "algorithm.options",
            {"reference_refresh": 256, "reference_mix": 0.6},
        ),
        ("eval_strategy: steps", "eval.every", 10),
        ("eval_strategy: steps\nlogging_steps: 20", "eval.every", 20),
        ("eval_strategy: steps\nlogging_steps: 20\neval_steps: 0", "eval.every", 20),
        ("eval_strategy: steps\nlogging_steps: 0.1\nmax_steps: 300", "eval.every", 30),
        ("eval_strategy: steps\nlogging_steps: 20\neval_steps: 50", "eval.every", 50),
        ("eval_strategy: steps\nlogging_steps: 20\nnum_iterations: 2", "eval.every", 10),
        ("eval_steps: 50", "eval.items", 0),
        ("eval_steps: 50", "eval.every", 0),
        ("save_strategy: best\neval_strategy: steps", "save.keep_best", 1),
        ("warmup_ratio: 0.012\nmax_steps: 100", "optim.warmup_steps", 2),
    ],
)
def test_settings_of_trl_that_depend_on_others(settings: str, key: str, value: Any, tmp_path: Path) -> None:
    config, _, written = convert(tmp_path, "a.yaml", f"num_generations: 8\n{settings}\n")
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value
    assert ("# - entropy_target=0.3: it is algorithm.entropy_coef" in written) == ("0.3" in settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            "num_generations: 8\nmax_completion_length: null",
            "max_completion_length=None: sampling.max_new_tokens takes no null",
        ),
        ("packing: false\nmax_length: null", "max_length"),
        ("center_rewards_coefficient: 0.1\ndisable_dropout: false", "disable_dropout=False: it is model.dropout"),
        ("num_generations: 8\neval_steps: 50", "eval_steps=50: it is eval.every; it changes nothing"),
        (
            "num_generations: 8\neval_strategy: steps\nload_best_model_at_end: true",
            "metric_for_best_model: it is not set, and transformers then takes the loss",
        ),
        ("num_generations: 8\nsync_ref_model: true", "sync_ref_model=True: it is algorithm.options.reference_refresh"),
    ],
)
def test_values_of_trl_without_a_counterpart_are_listed(settings: str, line: str, tmp_path: Path) -> None:
    _, _, written = convert(tmp_path, "a.yaml", f"{settings}\n")
    assert f"# - {line}" in written


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("warmup_steps: null", "warmup_steps=None"),
        ("gradient_accumulation_steps: two", "gradient_accumulation_steps='two'"),
        ("per_device_train_batch_size: [4]", "per_device_train_batch_size=[4]"),
        ("save_strategy: steps\nsave_steps: often", "save_steps='often'"),
    ],
)
def test_a_value_of_a_kind_that_the_conversion_does_not_take_is_named(
    settings: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.yaml"
    source.write_text(f"num_generations: 8\n{settings}\n")
    assert main(["config", "--from", "trl", str(source)]) == 2
    assert f"{named} cannot be converted (" in " ".join(capsys.readouterr().err.split())


def test_a_loss_of_fine_tuning_that_podium_lacks_is_listed(tmp_path: Path) -> None:
    _, _, written = convert(tmp_path, "a.yaml", "packing: true\nloss_type: dft\n")
    assert "# - loss_type=dft: the loss is the mean of -log p" in written
    for loss in ("nll", "chunked_nll"):
        _, _, written = convert(tmp_path, f"{loss}.yaml", f"packing: true\nloss_type: {loss}\n")
        assert "loss_type" not in written


@pytest.mark.parametrize("mark", ["beta: 0.1", "center_rewards_coefficient: 0.1", "packing: false"])
@pytest.mark.parametrize("metric", ["", "metric_for_best_model: accuracy\n"])
def test_the_best_checkpoint_is_that_of_the_lowest_loss(mark: str, metric: str, tmp_path: Path) -> None:
    """Fine-tuning is judged by its loss anyway, and preferences by their accuracy unless eval.metric says otherwise."""
    text = f"{mark}\n{metric}eval_strategy: steps\nload_best_model_at_end: true\n"
    config, _, _ = convert(tmp_path, "a.yaml", text)
    assert config.eval.metric == ("auto" if metric or "packing" in mark else "loss")
    assert config.save.keep_best == 1


def test_intervals_that_a_script_does_not_decide_are_not_set(tmp_path: Path) -> None:
    text = "SFTConfig(packing=False, eval_strategy='steps', eval_steps=find(), logging_steps=20, save_steps=find())\n"
    _, values, written = convert(tmp_path, "a.py", text)
    assert "every" not in values.get("eval", {}) and "save" not in values
    assert "# - eval_steps, save_steps: the file does not decide this" in written
    _, values, _ = convert(tmp_path, "b.py", "SFTConfig(packing=False, eval_strategy=find())\n")
    assert "eval" not in values
