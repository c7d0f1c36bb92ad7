"""verl's settings as a configuration of Podium: the settings that the table alone does not convert."""

from collections.abc import Callable
from typing import Any, Final, cast

from podium.installed import has_library
from podium.spelling import write_count
from podium_migration.conversion import Conversion, convert_settings
from podium_migration.sources import Settings

__all__ = ["convert_verl"]

ACTOR: Final = "actor_rollout_ref.actor"
ROLLOUT: Final = "actor_rollout_ref.rollout"
MODEL: Final = "actor_rollout_ref.model"
OF_CRITIC: Final = ("algorithm.lam", "algorithm.value_clip", "critic.")
ONLY_SET: Final = (
    "engine.",
    "run.",
    "save.",
    "data.train",
    "data.eval",
    "model.path",
    "critic.path",
    "reward.",
    "parallel.",
)

_MOST_REFILLS: Final = 1000  # that batch.prompts takes
_NORMALIZED: Final = ("grpo", "grpo_vectorized", "grpo_passk")
"""verl's estimators that norm_adv_by_std_in_grpo concerns."""


def convert_verl(settings: Settings) -> Conversion:
    """Return the configuration of Podium that means what the settings mean for verl."""
    conversion = convert_settings(settings, _convert)
    conversion.lost += [f"{subject}: {remark}" for subject, remark in settings.changes]
    return conversion


def _convert(settings: Settings) -> Conversion:
    estimator = settings.values.get("algorithm.adv_estimator", "gae")
    recipe = "ppo" if estimator == "gae" else "grpo"
    backend = settings.values.get("model_engine", settings.values.get(f"{ACTOR}.strategy", "fsdp"))
    conversion = Conversion("verl", settings, recipe, "megatron" if backend == "megatron" else "fsdp")
    conversion.convert_plain(only_set=ONLY_SET if recipe == "ppo" else (*ONLY_SET, *OF_CRITIC))
    for rule in _RULES:
        rule(conversion)
    if recipe == "grpo":
        conversion.values = {key: value for key, value in conversion.values.items() if not key.startswith(OF_CRITIC)}
    return conversion


def _convert_data(c: Conversion) -> None:
    for name, key in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = c.settings.values.get(name)
        files = [files] if isinstance(files, str) else files or []
        if len(files) == 1:
            c.set(key, str(files[0]))
        elif files:
            c.set(key, [str(file) for file in files])
    if c.get("data.filter_overlong_prompts"):
        c.set("data.overlong", "drop")
    elif c.get("data.truncation") == "left":
        c.set("data.overlong", "cut")
    elif c.is_set("data.truncation") and c.get("data.truncation") != "error":
        c.lose("data.truncation", "a prompt is cut at its front only; longer prompts are left out")
    _convert_samples(c)
    if c.settings.values.get("data.seed") is not None:
        c.set("run.seed", c.get("data.seed"))


def _convert_samples(c: Conversion) -> None:
    """The largest numbers of rows. verl's are of all files together, and Podium's are of each source."""
    if c.get("data.val_max_samples") == -1:
        c.set("eval.items", 10**9, "verl evaluates on all held-out prompts.")
    else:
        _share_samples(c, "data.val_max_samples", "data.eval", "eval.items")
    if c.get("data.train_max_samples") != -1:
        _share_samples(c, "data.train_max_samples", "data.train", "data.train_items")


def _share_samples(c: Conversion, name: str, key: str, items: str) -> None:
    """Set the number of rows of each source to its share of the rows of all."""
    sources, most = c.values.get(key), c.get(name)
    if not isinstance(sources, list) or not isinstance(most, int) or most < 1:
        c.set(items, most)
        return
    count = len(cast("list[Any]", sources))
    c.set(items, max(1, most // count), f"verl takes {most} rows of all files together, and this is of each source.")
    c.lose(
        name,
        f"{items} counts the rows of each of the {count} sources of {key}, and is an equal share here, however many "
        "rows verl would take of each file",
    )


def _convert_batches(c: Conversion) -> None:
    prompts, size = c.get("data.train_batch_size"), c.get(f"{ACTOR}.ppo_mini_batch_size")
    undecided = {"data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"} & set(c.settings.undecided)
    if undecided:
        return
    minibatches = max(1, prompts // size)
    if prompts % size and prompts > size:
        c.lose(
            f"{ACTOR}.ppo_mini_batch_size",
            f"{write_count(prompts, 'prompt')} do not divide by {size}; {write_count(minibatches, 'minibatch')} are "
            "taken",
        )
    note = f"data.train_batch_size / ppo_mini_batch_size = {prompts} / {size}, both in prompts."
    c.set("algorithm.minibatches", minibatches, note)
    _convert_warmup(c, minibatches * c.get(f"{ACTOR}.ppo_epochs"))


def _convert_filter(c: Conversion) -> None:
    """Dynamic sampling, which is a form of ``batch.prompts``."""
    group = "algorithm.filter_groups"
    if not c.get(f"{group}.enable") or "data.train_batch_size" in c.settings.undecided:
        return
    metric, draws = c.get(f"{group}.metric"), max(0, c.get(f"{group}.max_num_gen_batches", 0))
    theirs = f"at most {write_count(draws, 'draw')}" if draws else "draws without a limit"
    note = f"verl has {theirs}, and ends the run if they do not suffice; here the step trains with what it has."
    if metric not in (None, "acc", "score", "seq_reward", "seq_final_reward"):
        c.lose(f"{group}.metric", "groups are compared by their rewards, or by what is correct (filter: accuracy)")
    chosen = {"filter": "accuracy" if metric == "acc" else "rewards", "refills": draws - 1 if draws else _MOST_REFILLS}
    c.set("batch.prompts", {"count": c.get("data.train_batch_size"), **chosen}, note)


def _convert_warmup(c: Conversion, updates: int) -> None:
    steps, share = c.get(f"{ACTOR}.optim.lr_warmup_steps"), c.get(f"{ACTOR}.optim.lr_warmup_steps_ratio")
    total = c.settings.values.get("trainer.total_training_steps")
    if steps is not None and steps > 0:
        c.set(
            "optim.warmup_steps",
            steps * updates,
            f"{write_count(steps, 'training step')} of {write_count(updates, 'optimizer step')} each.",
        )
    elif share and total:
        count = int(share * total)
        c.set(
            "optim.warmup_steps",
            count * updates,
            f"{share:g} of {write_count(total, 'training step')}, of {write_count(updates, 'optimizer step')} each.",
        )
    elif share:
        c.lose(
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            f"optim.warmup_steps counts optimizer steps: {share:g} x the training steps of the run x {updates}",
        )


def _convert_micro_batches(c: Conversion) -> None:
    rows = c.settings.values.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if c.get(f"{ACTOR}.use_dynamic_bsz", False) or c.is_set(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        c.set("parallel.micro_batch_tokens", c.get(f"{ACTOR}.ppo_max_token_len_per_gpu"))
    elif rows:
        tokens = rows * (c.get("data.max_prompt_length") + c.get("data.max_response_length"))
        c.set("parallel.micro_batch_tokens", tokens, f"{write_count(rows, 'row')} of the longest prompt and response.")


def _convert_objective(c: Conversion) -> None:
    loss = c.values.get("algorithm.loss", "ppo_clip")
    low, high, both = (c.get(f"{ACTOR}.clip_ratio{end}") for end in ("_low", "_high", ""))
    explicit = [c.settings.values.get(f"{ACTOR}.clip_ratio{end}", 0.2) for end in ("_low", "_high")]
    low = both if explicit[0] is None else low
    c.set(
        "algorithm.clip_low",
        min(low, 1.0),
        "A ratio is above 0, so a bound below 0 has no effect." if low > 1 else "",
    )
    c.set("algorithm.clip_high", both if explicit[1] is None else high)
    if c.is_set(f"{ACTOR}.clip_ratio") and None not in explicit and both != explicit[0]:
        c.lose(
            f"{ACTOR}.clip_ratio",
            "clip_ratio_low and clip_ratio_high decide, which are 0.2 unless they are set to null",
        )
    if loss == "ppo_clip":
        c.set("algorithm.options.dual_clip", c.get(f"{ACTOR}.clip_ratio_c"), "verl's dual clip is on by default.")
    for name, answer in c.table.answers.items():
        if answer.group == loss and answer.key.startswith("algorithm.options.") and c.get(name) is not None:
            c.set(answer.key, c.get(name))
    if c.recipe == "ppo" and (warmup := c.get("trainer.critic_warmup")) > 1:
        c.set("algorithm.options.critic_warmup", warmup - 1, "verl's is the first step in which the policy learns.")
    if loss == "gspo":
        c.set("algorithm.aggregation", "sequence-mean", "verl's gspo takes it whatever loss_agg_mode says.")
    if c.get("algorithm.adv_estimator") in _NORMALIZED:
        c.set("algorithm.normalize_advantage", bool(c.get("algorithm.norm_adv_by_std_in_grpo")))
    _convert_correction(c)


def _convert_correction(c: Conversion) -> None:
    weights, cap = (c.get(f"algorithm.rollout_correction.rollout_is{end}") for end in ("", "_threshold"))
    named = {"token": "truncate", "sequence": "sequence_truncate"}
    if weights in named:
        c.set("algorithm.correction", named[weights])
        c.set("algorithm.options.weight_cap", cap)
    elif weights:
        c.lose("algorithm.rollout_correction.rollout_is", "algorithm.correction has other names for it")
    for end in ("rollout_rs", "bypass_mode"):
        if c.get(f"algorithm.rollout_correction.{end}"):
            c.lose(
                f"algorithm.rollout_correction.{end}", "algorithm.correction names masks and bypass: docs/algorithms.md"
            )


def _convert_lengths(c: Conversion) -> None:
    """The lengths of rollouts, which follow those of the data unless they are set."""
    response, prompt = (c.settings.values.get(f"{ROLLOUT}.{part}_length") for part in ("response", "prompt"))
    if response not in (None, c.get("data.max_response_length")):
        c.set("sampling.max_new_tokens", response, "rollout.response_length, which verl's engines take.")
    if prompt not in (None, c.get("data.max_prompt_length")):
        c.lose(f"{ROLLOUT}.prompt_length", "prompts have one bound, data.max_prompt_tokens: data.max_prompt_length")


def _convert_critic(c: Conversion) -> None:
    """Name settings of the critic that differ from the policy's, which it has here: those that are off or unset."""
    for name, answer in c.table.answers.items() if c.recipe == "ppo" else ():
        twin = f"{ACTOR}{name.removeprefix('critic')}"
        if not (name.startswith("critic.") and answer.missing and twin in c.table.answers):
            continue
        value = c.settings.values.get(name)
        differs = value != c.get(twin) if c.is_set(name) else _differs_by_default(c, name, twin)
        if differs and not any(line.startswith(f"{name}=") for line in c.lost):
            c.lose(name, answer.remark)


def _differs_by_default(c: Conversion, name: str, twin: str) -> bool:
    """Whether the policy has another value than both have by default; the critic of verl does not follow it."""
    usual = c.table.answers[twin].default
    return ".optim." in name and c.is_set(twin) and usual is not None and c.get(twin) != usual


def _convert_kl(c: Conversion) -> None:
    in_loss, in_reward = c.get(f"{ACTOR}.use_kl_loss"), c.get("algorithm.use_kl_in_reward")
    name = f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"
    if not in_loss and not in_reward:
        c.set("algorithm.kl_in", "none")
        c.set("algorithm.kl_coef", 0.0)
        return
    if in_loss and in_reward:
        c.lose("algorithm.use_kl_in_reward", "the KL counts in one place: it is in the loss above")
    c.set("algorithm.kl_in", "loss" if in_loss else "reward")
    c.set("algorithm.kl_coef", c.get(f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"))
    answer = c.table.answers[name]
    translation = answer.translate(c.get(name))
    estimator = c.get(name) if translation is None else translation.value
    note = "" if translation is None else translation.remark
    if translation is not None and translation.missing:
        c.lose(name, translation.remark)
        estimator = "k3" if in_loss else "k1"
    if in_loss and estimator == "k1":
        estimator, note = "k3", "verl's k1 in the loss has no gradient on average, so k3 stands here."
    c.set("algorithm.kl_estimator", estimator, note)
    if not in_loss and c.get("algorithm.kl_ctrl.type") == "adaptive":
        c.set("algorithm.kl_target", c.get("algorithm.kl_ctrl.target_kl"))


def _convert_sampling(c: Conversion) -> None:
    if c.get(f"{ROLLOUT}.do_sample") is False:
        c.lose(f"{ROLLOUT}.do_sample", "training needs samples that differ")
    samples = c.get(f"{ROLLOUT}.val_kwargs.do_sample")
    temperature = c.get(f"{ROLLOUT}.val_kwargs.temperature", 0) if samples else 0.0
    off = {"n": 1, "top_p": 1.0, "top_k": -1}
    entries = {name: c.get(f"{ROLLOUT}.val_kwargs.{name}", usual) for name, usual in off.items()}
    entries = {name: value for name, value in entries.items() if value != off[name]} if samples and temperature else {}
    c.set("eval.temperature", {"temperature": temperature, **entries} if entries else temperature)
    if c.is_set(f"{ROLLOUT}.val_kwargs.temperature") and not samples and c.get(f"{ROLLOUT}.val_kwargs.temperature"):
        c.notes["eval.temperature"] = "verl ignores val_kwargs.temperature while val_kwargs.do_sample is false."
    engine = c.values.pop("engine.name", None)
    if engine == "vllm" and has_library("podium_vllm") and has_library("vllm"):
        c.set("engine.name", "vllm")
        for name, option in (
            ("tensor_model_parallel_size", "tensor_parallel_size"),
            ("max_model_len", "max_model_len"),
        ):
            if c.settings.values.get(f"{ROLLOUT}.{name}"):
                c.set(f"engine.options.{option}", c.get(f"{ROLLOUT}.{name}"))
    elif engine == "vllm":
        c.lose(f"{ROLLOUT}.name", "vllm is not installed here; in Podium's clone: pip install ./plugins/podium-vllm")
    if c.is_set(f"{ROLLOUT}.gpu_memory_utilization"):
        c.lose(
            f"{ROLLOUT}.gpu_memory_utilization",
            "engine.cache_gib is the size of the cache in GiB; unset, it is a quarter of the free memory",
        )


def _convert_placement(c: Conversion) -> None:
    names = ("trainer.n_gpus_per_node", "trainer.nnodes")
    if any(map(c.is_set, names)) and not set(names) & set(c.settings.undecided):
        devices, nodes = map(c.get, names)
        rows = c.get("data.train_batch_size") * c.get(f"{ROLLOUT}.n") // c.values.get("algorithm.minibatches", 1)
        note = f"{nodes} x {write_count(devices, 'device')}; 1 on a machine without them."
        if devices * nodes > rows:
            each = write_count(rows, "completion")
            note = f"Of {nodes} x {devices} devices, one for each of a minibatch's {each}: no model is split."
        c.set("placement.ranks", min(devices * nodes, rows), note)
    if c.values.get("run.schedule", "sync") != "sync":
        c.set("placement.layout", "split", "The generator draws while the policy learns, in processes of its own.")
    if c.values.get("placement.ranks", 1) > 1 and c.theirs == "fsdp":
        c.set("parallel.strategy", "fsdp2", "replicate is faster where the model fits.")
    all_of_it, optimizer = (c.get(f"{ACTOR}.fsdp_config.{part}_offload") for part in ("param", "optimizer"))
    if all_of_it or optimizer:
        c.set("parallel.offload", "all" if all_of_it else "optimizer", "It holds for every role.")
    if c.get(f"{MODEL}.lora_rank"):
        c.set("model.lora.rank", c.get(f"{MODEL}.lora_rank"))
        c.set("model.lora.alpha", float(c.get(f"{MODEL}.lora_alpha")))
        targets = c.get(f"{MODEL}.target_modules")
        c.set(
            "model.lora.targets", [] if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
        )


def _convert_reward(c: Conversion) -> None:
    path, name = (
        c.get(f"reward.custom_reward_function.{part}") or c.get(f"custom_reward_function.{part}")
        for part in ("path", "name")
    )
    files = str(c.settings.values.get("data.train_files")).lower()
    sources = str(c.values.get("data.train")).lower()
    if not path and "gsm8k" in files and "math" in files.replace("gsm8k_math", ""):
        c.lose(
            "data.train_files",
            "verl takes the reward of each row's data_source, and reward.name is that of the first file",
        )
    if path:
        c.set("reward.name", f"{path}:{name or 'compute_score'}")
    elif "math" in sources or "aime" in sources:
        c.set("reward.name", "math", "verl takes the reward of each row's data_source.")
    elif "gsm8k" in sources:
        c.set("reward.name", "gsm8k", "verl takes the reward of each row's data_source.")
    else:
        c.lose("reward.custom_reward_function.path", "verl takes the reward of each row's data_source: set reward.name")
    model = c.settings.values.get("reward.reward_model.model_path") or c.settings.values.get("reward_model.model.path")
    if model and (c.get("reward.reward_model.enable") or c.get("reward_model.enable")):
        c.set("reward.path", model)
        if not path:
            c.set("reward.name", "model")
    manager = c.get("reward.reward_manager.name") or c.get("reward_model.reward_manager")
    if manager not in (None, "naive"):
        c.lose(
            "reward.reward_manager.name",
            f"{manager}: a function of yours does what a manager does: docs/coming-from-verl.md",
        )


def _convert_run(c: Conversion) -> None:
    if f"{MODEL}.path" not in c.settings.undecided:
        c.set("model.path", c.get(f"{MODEL}.path"))
    steps = c.settings.values.get("trainer.total_training_steps")
    if steps is None and "trainer.total_training_steps" not in c.settings.undecided:
        c.set("run.epochs", c.get("trainer.total_epochs"))
    trackers = c.settings.values.get("trainer.logger") or []
    project = c.settings.values.get("trainer.project_name")
    chosen = list[Any]()
    for tracker in [trackers] if isinstance(trackers, str) else trackers:
        if tracker in ("wandb", "tensorboard", "trackio") and has_library(tracker):
            chosen.append({tracker: {"project": project}} if project and tracker == "wandb" else tracker)
        elif tracker != "console":
            c.lose("trainer.logger", f"{tracker} is not installed here, or none of tensorboard, wandb and trackio")
    if chosen:
        c.set("run.trackers", chosen)
    if c.settings.values.get("trainer.save_freq", -1) > 0:
        c.set("save.keep", c.settings.values.get("trainer.max_actor_ckpt_to_keep") or 0, "0 keeps all.")
    if c.settings.values.get("trainer.resume_mode") == "resume_path":
        c.lose("trainer.resume_mode", "a checkpoint of verl is no run of Podium's: merge it, and name it as model.path")
    if any(c.get(f"{ROLLOUT}.multi_turn.{part}") for part in ("enable", "tool_config_path")):
        c.lose(f"{ROLLOUT}.multi_turn.enable", "environment.name names a function of yours that holds the conversation")


_RULES: Final[tuple[Callable[[Conversion], None], ...]] = (
    _convert_data,
    _convert_batches,
    _convert_filter,
    _convert_micro_batches,
    _convert_objective,
    _convert_kl,
    _convert_critic,
    _convert_lengths,
    _convert_sampling,
    _convert_placement,
    _convert_reward,
    _convert_run,
)
