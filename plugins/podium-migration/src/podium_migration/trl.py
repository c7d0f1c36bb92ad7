"""TRL's settings as a configuration of Podium: the settings that the table alone does not convert."""

import math
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.installed import has_library
from podium.spelling import write_count
from podium_migration.conversion import Conversion, convert_settings
from podium_migration.model_types import find_model_type, read_peft_targets
from podium_migration.sources import Settings, explain_other_trainer

__all__ = ["convert_trl"]

ONLY_SET: Final = (
    "engine.",
    "run.",
    "save.",
    "data.",
    "model.path",
    "reward.",
    "parallel.",
    "placement.",
    "model.dtype",
)
WITHOUT_DROPOUT: Final = ("qwen2", "qwen3", "llama", "mistral")
"""Types of models that have no dropout of their own."""
_OURS: Final = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "reward": "rm"}

_CORRECTIONS = {
    "token_truncate": ("truncate", "weight_cap"),
    "token_mask": ("icepop", "icepop_high"),
    "sequence_truncate": ("sequence_truncate", "weight_cap"),
    "sequence_mask": ("sequence_mask", "sequence_high"),
}


def convert_trl(settings: Settings) -> Conversion:
    """Return the configuration of Podium that means what the settings mean for TRL.

    Raises:
        ConfigError: Podium has no recipe of this kind.
    """
    recipe = settings.recipe or _guess_recipe(settings)
    conversion = convert_settings(settings._replace(recipe=recipe), _convert)
    conversion.lost += [f"{subject}: {remark}" for subject, remark in settings.changes]
    if not settings.recipe and recipe in _ALSO:
        mark = min(_MARKS[recipe] & settings.values.keys())
        conversion.lost.append(
            f"trainer: the file names no trainer, and is taken for settings of {recipe} because of {mark}; "
            f"{_ALSO[recipe]} has this setting, too"
        )
    return conversion


def _convert(settings: Settings) -> Conversion:
    theirs = settings.recipe
    recipe = _OURS[theirs]
    conversion = Conversion("TRL", settings, recipe, theirs)
    conversion.convert_plain(only_set=ONLY_SET if recipe == "grpo" else (*ONLY_SET, "sampling.", "algorithm."))
    _convert_batches(conversion)
    _convert_evaluation(conversion)
    _convert_model(conversion)
    _convert_run(conversion)
    _convert_data(conversion)
    if recipe in ("dpo", "rm"):
        _convert_preferences(conversion)
    if recipe == "grpo":
        _convert_objective(conversion)
        _convert_rewards(conversion)
    _explain_defaults(conversion)
    return conversion


def _explain_defaults(c: Conversion) -> None:
    """Name what TRL does where the file says nothing, and Podium does not do."""
    if c.recipe == "sft" and not c.is_set("assistant_only_loss"):
        c.lose("assistant_only_loss", c.table.answers["assistant_only_loss"].remark)
    c.lost.append(
        "prompts: TRL takes a prompt that is text as it is, and Podium writes it as the user's message where the "
        "tokenizer has a chat template: data.chat_template none takes such prompts as they are"
    )
    most = c.defaults["data.max_prompt_tokens"]
    if c.recipe != "grpo" and not c.is_set("max_length"):
        c.lose(
            "max_length",
            f"TRL cuts prompt and answer together at {c.get('max_length')} tokens; here data.max_prompt_tokens "
            f"({most}) bounds the prompt, and no answer is cut",
        )
    elif c.recipe == "grpo" and c.settings.values.get("max_prompt_length") is None:
        c.lose(
            "max_prompt_length",
            f"TRL bounds no prompt; here prompts above data.max_prompt_tokens ({most}) are left out, and the run says "
            "how many",
        )
    dropout = c.settings.values.get("disable_dropout")
    kind, _ = find_model_type(str(c.settings.values.get("model_name_or_path") or ""))
    if c.recipe == "grpo" and dropout is None and kind not in WITHOUT_DROPOUT:
        c.lose(
            "disable_dropout",
            "a model's own dropout acts in TRL's reinforcement learning unless this is true, and here only where "
            "model.dropout is true",
        )


def _guess_recipe(settings: Settings) -> str:
    """TRL's trainer, by a setting of this trainer."""
    for other, names in _OTHER_MARKS.items():
        if used := sorted(names & settings.values.keys()):
            raise ConfigError(f"the file has {used[0]}, a setting of TRL's {explain_other_trainer(other)}")
    for recipe, names in _MARKS.items():
        if names & settings.values.keys():
            return recipe
    raise ConfigError(
        "the file does not say which trainer of TRL it is for: add a setting of that trainer, as NAME=VALUE: "
        + ", ".join(f"{min(names)} ({recipe})" for recipe, names in _MARKS.items())
    )


_MARKS: Final = {
    "grpo": {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon"},
    "dpo": {"beta", "precompute_ref_log_probs", "label_smoothing", "ld_alpha"},
    "reward": {"center_rewards_coefficient"},
    "sft": {"packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "packing_strategy"},
}


_OTHER_MARKS: Final = {
    "RLOO": {"rloo_k", "reward_clip_range", "normalize_advantages"},
    "KTO": {"desirable_weight", "undesirable_weight"},
    "PPO": {"num_ppo_epochs", "vf_coef", "cliprange_value"},
    "CPO": {"cpo_alpha", "simpo_gamma"},
    "GKD": {"lmbda", "seq_kd"},
}
_ALSO: Final = {"grpo": "RLOOTrainer", "dpo": "KTOTrainer"}
"""Other trainers that have the settings by which a recipe is guessed."""


_INTERVALS: Final = {"save_steps": 500, "logging_steps": 10}
"""TRL's defaults of intervals. That of eval_steps is logging_steps."""


def _convert_batches(c: Conversion) -> None:
    processes = c.settings.processes or 1
    accumulation = c.get("gradient_accumulation_steps")
    rows = c.get("per_device_train_batch_size") * processes
    each, devices = c.get("per_device_train_batch_size"), write_count(processes, "process", "processes")
    note = f"{write_count(each, 'row')} x {devices} x {write_count(accumulation, 'accumulation')}"
    if not c.settings.processes:
        c.lose(
            "per_device_train_batch_size",
            "the file names no number of processes, and 1 is assumed: the batch above is for one",
        )
    else:
        c.set("placement.ranks", processes)
    updates = 1
    if c.recipe != "grpo":
        c.set("batch.examples", rows * accumulation, f"{note}.")
        _explain_packing(c)
    else:
        n, reuse = c.get("num_generations"), c.get("steps_per_generation") or accumulation
        completions = c.settings.values.get("generation_batch_size") or rows * reuse
        minibatches = max(1, completions // (rows * accumulation))
        updates = minibatches * c.get("num_iterations")
        c.set(
            "batch.prompts",
            max(1, completions // n),
            f"{completions} completions are generated at a time, {n} of each prompt.",
        )
        if minibatches > 1 or c.is_set("steps_per_generation"):
            c.set("algorithm.minibatches", minibatches, f"{note} make one optimizer step.")
    _convert_length(c, updates)


def _explain_packing(c: Conversion) -> None:
    """Rows of TRL hold several examples with ``packing``, and ``batch.examples`` counts examples."""
    if c.recipe == "sft" and c.get("packing"):
        c.notes["batch.examples"] += " TRL's rows hold several examples each: see below."
        length, most = c.get("max_length"), c.get("max_steps")
        c.lose(
            "packing",
            f"TRL puts examples together into rows of max_length tokens ({length}) and counts these rows in a batch; "
            "batch.examples counts examples: multiply it by the mean number of examples in a row, which is max_length "
            "divided by their mean length" + ("" if most > 0 else "; the number of steps of an epoch is then theirs"),
        )


def _convert_length(c: Conversion, updates: int) -> None:
    """The length of the run and what counts its steps. TRL's steps are optimizer steps, of which a step has several."""
    most = c.get("max_steps")
    if most > 0:
        c.set("run.steps", max(1, most // updates), f"{most} optimizer steps, {updates} a step." if updates > 1 else "")
    else:
        c.set("run.epochs", c.get("num_train_epochs"))
    warmup, share = c.get("warmup_steps"), c.get("warmup_ratio") or 0
    share = warmup if 0 < warmup < 1 else share
    if share and most > 0:
        c.set("optim.warmup_steps", math.ceil(share * most), f"{share:g} of {most} optimizer steps.")
    elif share:
        c.lose("warmup_ratio", f"optim.warmup_steps counts optimizer steps: {share:g} x those of the run")
    elif warmup:
        c.set("optim.warmup_steps", warmup)
    _convert_intervals(c, updates)
    if c.is_set("adam_beta1") or c.is_set("adam_beta2"):
        c.set("optim.betas", [c.get("adam_beta1"), c.get("adam_beta2")])


def _convert_intervals(c: Conversion, updates: int) -> None:
    """How often checkpoints are written and evaluations made, and which checkpoints are kept."""
    if c.get("save_strategy") == "steps" and (c.is_set("save_steps") or c.is_set("save_strategy")):
        _convert_interval(c, "save.every", "save_steps", updates)
    if c.is_set("save_total_limit"):
        c.set("save.keep", c.get("save_total_limit") or 0)
    if c.get("load_best_model_at_end") or c.get("save_strategy") == "best":
        c.set("save.keep_best", 1, "podium export runs/NAME@best writes the model of the best evaluation.")
        _convert_best(c)
    if c.get("eval_strategy") == "steps":
        follows = not c.settings.values.get("eval_steps") and "eval_steps" not in c.settings.undecided
        _convert_interval(c, "eval.every", "logging_steps" if follows else "eval_steps", updates)
    for name, key in (("eval_strategy", "eval.every"), ("save_strategy", "save.every")):
        if c.is_set(name) and c.get(name) not in ("steps", "no", False):
            c.lose(name, f"{key} counts steps; without it there is one after the last step")


def _convert_best(c: Conversion) -> None:
    """The figure by which a checkpoint is the best one where the file names none, which is the loss in transformers."""
    if c.settings.values.get("metric_for_best_model") is not None or c.recipe == "sft":
        return
    if c.recipe != "grpo":
        c.set("eval.metric", "loss", "transformers takes the loss where metric_for_best_model is not set.")
        return
    c.lose(
        "metric_for_best_model",
        "it is not set, and transformers then takes the loss, which says little of rewards; eval.metric auto takes the "
        "reward or the accuracy",
    )


def _convert_interval(c: Conversion, key: str, name: str, updates: int) -> None:
    """Set a number of steps between two events. Below 1 it is a share of the run's steps in TRL."""
    if name in c.settings.undecided:
        return
    interval, most = c.settings.values.get(name) or _INTERVALS[name], c.get("max_steps")
    if interval >= 1:
        note = "eval_steps is not set, and transformers then takes logging_steps, which is 10 in TRL."
        c.set(key, max(1, int(interval) // updates), note if name == "logging_steps" else "")
    elif most > 0:
        c.set(key, max(1, math.ceil(interval * most) // updates), f"{interval:g} of {most} optimizer steps.")
    else:
        c.lose(name, f"{key} counts steps: {interval:g} x those of the run")


def _convert_evaluation(c: Conversion) -> None:
    if "eval_strategy" in c.settings.undecided:
        return
    if c.get("eval_strategy") in ("no", False):
        c.set("eval.items", 0, "TRL evaluates only where eval_strategy is set, and holds no examples out.")
        c.set("data.holdout", 0.0)
        if c.get("eval_on_start"):
            c.lose("eval_on_start", "nothing is evaluated here where eval_strategy is no: set eval.items")
        return
    c.set("eval.at_start", bool(c.get("eval_on_start")))


def _convert_objective(c: Conversion) -> None:
    c.set("algorithm.clip_low", c.get("epsilon"))
    c.set("algorithm.clip_high", c.get("epsilon_high") or c.get("epsilon"))
    if c.get("delta") is not None:
        c.set("algorithm.options.dual_clip", c.get("delta"))
    if c.get("beta"):
        c.set("algorithm.kl_in", "loss")
        c.set("algorithm.kl_coef", c.get("beta"))
    name = str(c.get("loss_type"))
    translation = c.table.answers["loss_type"].translate(name)
    if translation is None or translation.missing:
        c.lose("loss_type", "a loss is a function of about twenty lines: docs/algorithms.md writes one")
    elif name == "dr_grpo":
        _convert_dr_grpo(c, translation.remark)
    elif translation.key:
        _convert_own_loss(c, str(translation.value))
    else:
        c.set("algorithm.aggregation", translation.value)
    if c.get("importance_sampling_level") == "sequence":
        c.set("algorithm.loss", "gspo")
    if c.get("disable_dropout") is False and c.is_set("disable_dropout"):
        c.set("model.dropout", True, "It has no effect on a model without dropout of its own.")
    _convert_following(c)
    if c.get("use_vllm") and c.get("vllm_importance_sampling_correction"):
        cap, mode = c.get("vllm_importance_sampling_clip_max"), str(c.get("vllm_importance_sampling_mode"))
        name, bound = _CORRECTIONS.get(mode, ("truncate", "weight_cap"))
        c.set("algorithm.correction", name)
        c.set(f"algorithm.options.{bound}", cap)
        least = c.get("vllm_importance_sampling_clip_min")
        if least is not None and bound.endswith("_high"):
            c.set(f"algorithm.options.{bound.removesuffix('_high')}_low", least)


def _convert_following(c: Conversion) -> None:
    """An entropy bonus that follows the entropy, and a reference that follows the policy."""
    if c.get("use_adaptive_entropy"):
        entries = {name: c.get(f"entropy_coef_{name}") for name in ("delta", "min", "max")}
        target = {"target": c.get("entropy_target"), **entries, "start": c.get("entropy_coef")}
        c.set("algorithm.entropy_coef", target, "The bonus counts only while the entropy is below the target.")
    if c.get("sync_ref_model") and c.get("beta"):
        steps, updates = (
            c.get("ref_model_sync_steps"),
            c.get("num_iterations") * c.values.get("algorithm.minibatches", 1),
        )
        note = f"{write_count(steps, 'optimizer step')}, {updates} a step."
        c.set("algorithm.options.reference_refresh", max(1, steps // updates), note)
        c.set("algorithm.options.reference_mix", c.get("ref_model_mixup_alpha"))


def _convert_dr_grpo(c: Conversion, remark: str) -> None:
    """Dr. GRPO, which in TRL is the aggregation alone: ``scale_rewards`` says whether the deviation divides."""
    if c.values.get("algorithm.normalize_advantage") is False:
        c.set("algorithm.advantage", "dr_grpo", remark)
        del c.values["algorithm.normalize_advantage"]
        return
    c.set("algorithm.advantage", "grpo")
    c.set(
        "algorithm.aggregation",
        "sequence-sum-constant",
        "TRL's dr_grpo is this aggregation; scale_rewards keeps the division by the deviation, which the paper's "
        "leaves out.",
    )


def _convert_own_loss(c: Conversion, loss: str) -> None:
    """A loss of TRL's that is one of Podium's, with the bounds that it reads."""
    c.set("algorithm.loss", loss)
    del c.values["algorithm.clip_low"], c.values["algorithm.clip_high"]
    if loss == "cispo":
        c.set(
            "algorithm.clip_high",
            (c.get("epsilon_high") or c.get("epsilon")) - 1.0,
            "TRL's epsilon_high is the bound itself.",
        )
        c.set("algorithm.aggregation", "token-mean")
    for name, answer in c.table.answers.items():
        if answer.group == loss:
            c.set(answer.key, c.get(name))


def _convert_preferences(c: Conversion) -> None:
    for name, answer in c.table.answers.items():
        chosen = answer.choose(c.defaults)
        if chosen is not None and chosen.group == c.recipe and c.is_set(name):
            c.set(chosen.key, c.get(name))
    if c.recipe == "dpo":
        losses = c.settings.values.get("loss_type", "sigmoid")
        first = losses[0] if isinstance(losses, list) else losses
        answer = c.table.answers["loss_type"].choose(c.defaults)
        translation = answer.translate(first) if answer else None
        if translation is None or translation.missing or (isinstance(losses, list) and len(losses) > 1):
            c.lose("loss_type", translation.remark if translation else "podium train dpo has one loss")
        else:
            c.set("algorithm.loss", translation.value)


def _convert_rewards(c: Conversion) -> None:
    functions = c.settings.values.get("reward_funcs")
    functions = [functions] if isinstance(functions, str) else list(functions or [])
    names = [_name_reward(str(function)) for function in functions]
    for function, name in zip(functions, names, strict=True):
        if name == "":
            c.lose("reward_funcs", f"{function}: give your own function as path/file.py:function")
    names = [name for name in names if name]
    if names:
        c.set("reward.name", names[0] if len(names) == 1 else names)
    elif not functions:
        c.lose("reward_funcs", "the file names no reward: set reward.name")
    _convert_weights(c, names)
    if model := c.settings.values.get("reward_model_name_or_path"):
        c.set("reward.path", model)
        c.set("reward.name", "model")
    for name in ("tools", "environment_factory", "rollout_func"):
        if c.is_set(name):
            c.lose(name, "environment.name names a function of yours: docs/coming-from-trl.md")


def _convert_weights(c: Conversion, names: list[str]) -> None:
    weights = c.settings.values.get("reward_weights")
    if c.get("multi_objective_aggregation") == "normalize_then_sum":
        c.set("algorithm.advantage", "gdpo", "Each reward is normalized by itself.")
        c.values.pop("reward.weights", None)
        parts = [name.rpartition(":")[2] for name in names]
        if weights and len(weights) == len(parts) == len(set(parts)):
            c.set("algorithm.options.part_weights", dict(zip(parts, weights, strict=True)))
        elif weights:
            c.lose("reward_weights", "algorithm.options.part_weights has a weight for each reward by its name")


def _name_reward(function: str) -> str:
    """The name of a reward here: a function of the file or of a module, or Podium's own. "" if there is none."""
    if ":" in function:
        return function
    module, _, name = function.rpartition(".")
    if name in ("accuracy_reward", "reasoning_accuracy_reward") and module in ("", "trl.rewards"):
        return "math"
    return f"{module}:{name}" if module and module != "trl.rewards" else ""


def _convert_model(c: Conversion) -> None:
    if c.get("use_peft"):
        c.set("model.lora.rank", c.get("lora_r"))
        c.set("model.lora.alpha", float(c.get("lora_alpha")))
        c.set("model.lora.dropout", c.get("lora_dropout"))
        _convert_targets(c)
        if c.recipe == "grpo" and c.get("lora_dropout"):
            c.set(
                "model.lora.dropout",
                0.0,
                "TRL's 0.05 by default is off here: noise would change the probability ratios.",
            )
    _convert_loading(c)
    if c.get("fp16"):
        c.set("parallel.precision", "float16")
    elif c.settings.values.get("bf16") is not None:
        c.set("parallel.precision", "bfloat16" if c.get("bf16") else "float32")
    if c.is_set("fsdp") or c.is_set("deepspeed"):
        c.set("parallel.strategy", "fsdp2")
    if c.settings.values.get("use_vllm"):
        if has_library("podium_vllm") and has_library("vllm"):
            c.set("engine.name", "vllm")
        else:
            c.values.pop("engine.name", None)
            c.lose("use_vllm", "vllm is not installed here; in Podium's clone: pip install ./plugins/podium-vllm")
    if c.recipe != "grpo" and c.settings.values.get("max_length") is not None:
        c.set(
            "data.max_prompt_tokens",
            c.get("max_length"),
            "It bounds the prompt; TRL's max_length cuts prompt and answer together.",
        )


def _convert_targets(c: Conversion) -> None:
    """The layers that get adapters. Where a script names none, peft chooses them by the type of the model."""
    targets = c.settings.values.get("lora_target_modules") or []
    names = [targets] if isinstance(targets, str) else list(targets)
    if names == ["all-linear"]:
        c.set("model.lora.targets", [])
        return
    if names or "lora_target_modules" in c.settings.undecided:
        c.set("model.lora.targets", names)
        return
    kind, origin = find_model_type(str(c.settings.values.get("model_name_or_path") or ""))
    usual = read_peft_targets(kind) if kind else None
    if isinstance(usual, list):
        note = f"The file names no layers, and peft then adapts these in models of type {kind}, by {origin}."
        c.set("model.lora.targets", usual, note)
        return
    c.set("model.lora.targets", [])
    lacks = f"for {kind} that is {usual!r}" if usual else f"none for {kind}" if kind else "which is not known here"
    c.lose(
        "lora_target_modules",
        "where no layers are named, peft adapts some by the type of the model, such as q_proj and v_proj for llama, "
        f"mistral, qwen2 and qwen3; {lacks}, and the file above says all linear layers: set model.lora.targets",
    )


def _convert_loading(c: Conversion) -> None:
    """What ``model_init_kwargs`` says about the model."""
    options = c.settings.values.get("model_init_kwargs")
    for name, value in options.items() if isinstance(options, dict) else ():
        if name in ("dtype", "torch_dtype") and value in ("float32", "bfloat16"):
            c.set("model.dtype", value)
        elif name == "attn_implementation":
            c.set("model.attention", value)
        elif value not in (None, "auto", False):
            c.lose("model_init_kwargs", f"{name} has no counterpart: the section model says how a model is loaded")


def _convert_run(c: Conversion) -> None:
    trackers = c.settings.values.get("report_to") or []
    project = c.settings.values.get("project")
    chosen = list[Any]()
    for tracker in [trackers] if isinstance(trackers, str) else trackers:
        if tracker in ("wandb", "tensorboard", "trackio") and has_library(tracker):
            chosen.append({tracker: {"project": project}} if project and tracker != "tensorboard" else tracker)
        elif tracker != "none":
            c.lose("report_to", f"{tracker} is not installed here, or none of tensorboard, wandb and trackio")
    if chosen:
        c.set("run.trackers", chosen)
    _convert_names(c)


def _convert_names(c: Conversion) -> None:
    name = str(c.settings.values.get("output_dir") or "").rstrip("/")
    if name and not c.is_set("run_name"):
        directory, _, last = name.rpartition("/")
        c.set("run.name", last)
        if directory:
            c.set("run.dir", directory)
    if c.is_set("seed"):
        c.set("run.seed", c.get("seed"))
    if c.get("log_completions"):
        c.set("run.show_samples", c.get("num_completions_to_print") or 2)
    if c.settings.values.get("chat_template_kwargs"):
        c.set("data.chat_template_kwargs", c.get("chat_template_kwargs"))
    if c.is_set("resume_from_checkpoint"):
        c.lose("resume_from_checkpoint", "a checkpoint of TRL is no run of Podium's: name it as model.path")


def _convert_data(c: Conversion) -> None:
    """The data sets, their splits and their configurations."""
    if c.is_set("eval_dataset"):
        c.set("data.eval", c.get("eval_dataset"))
    splits = {
        "dataset_train_split": ("data.train_split", "data.train_items takes its first rows"),
        "dataset_test_split": ("data.eval_split", "eval.items bounds the number of its rows"),
    }
    for name, (key, remark) in splits.items():
        split = c.settings.values.get(name)
        if isinstance(split, str) and "[" not in split:
            c.set(key, split)
        elif split:
            c.lose(name, f"{key} is the name of one split; {remark}")
    _convert_options(c)


def _convert_options(c: Conversion) -> None:
    """The configurations of data sets on the hub. They are options of each source where these have different ones."""
    train, evaluation = c.settings.values.get("dataset_config"), c.settings.values.get("eval_dataset_config")
    if train == evaluation or not c.is_set("eval_dataset"):
        if train:
            c.set("data.options", {"name": train})
        return
    sets = c.get("eval_dataset")
    configurations = dict[str, Any]()
    for sources, configuration in ((c.settings.values.get("dataset_name"), train), (sets, evaluation)):
        for source in _list_sources(sources):
            if configurations.setdefault(source, configuration) != configuration:
                c.lose(
                    "eval_dataset_config",
                    f"data.options has one configuration of {source}: write one of the two to a file",
                )
    if options := {source: {"name": name} for source, name in configurations.items() if name}:
        c.set("data.options", options)


def _list_sources(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [str(source) for source in cast("dict[Any, Any]", value).values()]
    return (
        [str(source) for source in cast("list[Any]", value)] if isinstance(value, list) else [str(value)] * bool(value)
    )
