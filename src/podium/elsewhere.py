"""What settings of TRL and verl are called here, so that a key of theirs is answered with ours.

TRL is read as of 1.16, verl as of 0.9.1.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["NAMES", "Here", "name_here"]


class Here(NamedTuple):
    """The answer to a name of another project.

    Attributes:
        key: The key that means the same. It is empty where no single key does.
        remark: A sentence on what differs. It is empty where nothing does.
        otherwise: The key in a configuration that lacks ``key``, such as that of supervised fine-tuning.
        missing: Whether Podium lacks what the name does. ``key`` is empty then.
    """

    key: str
    remark: str = ""
    otherwise: str = ""
    missing: bool = False


_KL = Here("algorithm.kl_coef", "set algorithm.kl_in to loss as well: without it no reference policy takes part")
_ROWS = Here(
    "batch.prompts",
    "it counts prompts: a step has batch.prompts x sampling.n completions on all ranks together, and "
    "parallel.micro_batch_tokens bounds the tokens of one forward pass",
    "batch.examples",
)
_MINIBATCH = Here("algorithm.minibatches", "it says how many optimizer steps an epoch has, not how large one is")
_BETAS = Here("optim.betas", "it holds both: --optim.betas '[0.9, 0.999]'")
_CAP = Here("algorithm.importance_cap", "weights are per token, and the cap alone turns them on")
_BEST = Here("save.keep_best", "podium export runs/NAME@best writes the model of the best evaluation")
_PUSH = Here("", "podium export runs/NAME --to DIR --push OWNER/NAME uploads the model after the run")
_DRAWN = Here("", "tokens are drawn by sampling.temperature, sampling.top_k and sampling.top_p", missing=True)
_FROZEN = Here("", "the reference stays the model that the run began with", missing=True)
_QUANTIZED = Here("", "adapters (model.lora.rank) train over weights in bfloat16 or float32", missing=True)
_NAME = Here("reward.name", "a name, module:function or path/file.py:function; a function of TRL's form runs as it is")

NAMES: Final[Mapping[str, Here]] = {
    # TRL and transformers: the optimizer and the length of the run
    "learning_rate": Here("optim.lr"),
    "lr_scheduler_type": Here("optim.lr_schedule", "constant, linear or cosine; optim.warmup_steps is apart"),
    "warmup_ratio": Here("optim.warmup_steps", "it counts optimizer steps"),
    "warmup_steps": Here("optim.warmup_steps"),
    "weight_decay": Here("optim.weight_decay"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": Here("optim.eps"),
    "max_grad_norm": Here("optim.grad_clip"),
    "max_steps": Here("run.steps"),
    "num_train_epochs": Here("run.epochs"),
    "seed": Here("run.seed"),
    # the batch
    "per_device_train_batch_size": _ROWS,
    "train_batch_size": Here("batch.prompts", "", "batch.examples"),
    "generation_batch_size": _ROWS,
    "gradient_accumulation_steps": Here(
        "", "a step accumulates by itself, and parallel.micro_batch_tokens bounds the tokens of one forward pass"
    ),
    "steps_per_generation": _MINIBATCH,
    "num_iterations": Here("algorithm.epochs"),
    # sampling
    "num_generations": Here("sampling.n"),
    "max_completion_length": Here("sampling.max_new_tokens"),
    "max_new_tokens": Here("sampling.max_new_tokens"),
    "max_prompt_length": Here("data.max_prompt_tokens"),
    "temperature": Here("sampling.temperature"),
    "top_p": Here("sampling.top_p"),
    "top_k": Here("sampling.top_k"),
    "use_vllm": Here("engine.name", "set it to vllm, after pip install 'podium[vllm]'"),
    "vllm_mode": Here("placement.layout", "colocated (the default) or split; no server is started by hand"),
    "vllm_gpu_memory_utilization": Here("engine.cache_gib", "it is the size of the cache in GiB, not a share"),
    "vllm_tensor_parallel_size": Here("engine.options.tensor_parallel_size"),
    "vllm_max_model_length": Here("engine.options.max_model_len"),
    "vllm_importance_sampling_correction": _CAP,
    "vllm_importance_sampling_clip_max": _CAP,
    "vllm_importance_sampling_cap": _CAP,
    "min_p": _DRAWN,
    "generation_kwargs": _DRAWN,
    "repetition_penalty": _DRAWN,
    # the algorithm
    "beta": _KL,
    "epsilon": Here("algorithm.clip_low", "algorithm.clip_high is the upper bound, 0.28 by default"),
    "epsilon_high": Here("algorithm.clip_high"),
    "delta": Here("algorithm.dual_clip"),
    "loss_type": Here(
        "algorithm.aggregation",
        "dapo and bnpo are token-mean (the default), grpo is sequence-mean, dr_grpo is sequence-sum-constant with "
        "algorithm.normalize_advantage false; other losses have names: algorithm.loss",
    ),
    "importance_sampling_level": Here("algorithm.loss", "gspo takes the ratio of whole sequences"),
    "scale_rewards": Here("algorithm.normalize_advantage", "true scales by the standard deviation of the group"),
    "reward_funcs": _NAME,
    "reward_weights": Here(
        "reward.name", "one function returns all parts, and their weighted sum as score: {'score': ..., 'format': ...}"
    ),
    "mask_truncated_completions": Here(
        "", "an advantage of your own (algorithm.advantage) sees truncated_B and can give those 0", missing=True
    ),
    "top_entropy_quantile": Here("", "a loss of your own (algorithm.loss) can choose its tokens", missing=True),
    "sync_ref_model": _FROZEN,
    "ref_model_sync_steps": _FROZEN,
    "ref_model_mixup_alpha": _FROZEN,
    "disable_dropout": Here("model.dropout", "it is off already in reinforcement learning"),
    # the model and its memory
    "model_name_or_path": Here("model.path"),
    "attn_implementation": Here("model.attention"),
    "gradient_checkpointing": Here("model.gradient_checkpointing"),
    "bf16": Here("parallel.precision", "bfloat16 is the default on accelerators, with parameters in float32"),
    "fp16": Here("parallel.precision", "set it to float16"),
    "dtype": Here("model.dtype"),
    "model_init_kwargs": Here("", "model.dtype, model.attention and the others of the section model say it"),
    "use_liger_kernel": Here("", "the output layer is computed in chunks anyway, which saves the same memory"),
    "packing": Here("parallel.batching", "rows that share a forward pass do not see one another"),
    "torch_compile": Here("parallel.compile"),
    "fsdp": Here("parallel.strategy", "set it to fsdp2"),
    "deepspeed": Here("parallel.strategy", "set it to fsdp2, which shards parameters, gradients and optimizer"),
    "use_peft": Here("model.lora.rank", "giving a rank turns adapters on"),
    "lora_r": Here("model.lora.rank"),
    "lora_alpha": Here("model.lora.alpha"),
    "lora_dropout": Here("model.lora.dropout"),
    "lora_target_modules": Here("model.lora.targets"),
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    # data, evaluation, files
    "dataset_name": Here("data.train", "a hub dataset or a file"),
    "dataset_train_split": Here("data.train_split"),
    "dataset_test_split": Here("data.eval_split"),
    "eval_steps": Here("eval.every"),
    "eval_strategy": Here("eval.every", "it counts steps; 0 evaluates before the first and after the last only"),
    "eval_on_start": Here("", "held-out prompts are evaluated before the first step anyway; eval.items 0 turns it off"),
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "save_steps": Here("save.every"),
    "save_strategy": Here("save.every", "it counts steps; save.minutes saves by time as well"),
    "save_total_limit": Here("save.keep"),
    "output_dir": Here("run.dir", "it holds the directories of runs, and run.name names this one's"),
    "run_name": Here("run.name"),
    "report_to": Here("run.trackers", "a list: --run.trackers '[wandb]'"),
    "resume_from_checkpoint": Here("run.resume", "podium train grpo --resume runs/NAME is the short form"),
    "logging_steps": Here(
        "", "every step is a row of metrics.jsonl, and the table in the terminal has at most one row a second"
    ),
    "log_completions": Here("run.show_samples", "a number; runs/NAME/completions has all of them in any case"),
    "num_completions_to_print": Here("run.show_samples"),
    "tools": Here("environment.name", "a function of yours gives the model its tools: docs/environments.md"),
    "max_tool_calling_iterations": Here(
        "environment.name",
        "a function of yours, with converse(..., max_turns=...): one more, since answers are counted",
    ),
    "environment_factory": Here(
        "environment.name", "a function of yours makes it and gives its methods to converse: docs/coming-from-trl.md"
    ),
    "rollout_func": Here("environment.name", "path/file.py:function of (task, client)"),
    "multi_turn.enable": Here("environment.name", "a function of yours holds the conversation: docs/environments.md"),
    "multi_turn.tool_config_path": Here("environment.name", "a function of yours gives the model its tools"),
    "multi_turn.max_assistant_turns": Here(
        "environment.name", "a function of yours, with converse(..., max_turns=...)"
    ),
    "agent.default_agent_loop": Here("environment.name", "path/file.py:function of (task, client)"),
    "agent.num_workers": Here(
        "", "sessions live in the generator's processes, many at a time; there is nothing to set"
    ),
    "logging_dir": Here("run.dir", "a run's metrics, logs and trackers' files are in its own directory below it"),
    "shuffle_dataset": Here("", "each pass over the data has an order of its own, which run.seed decides"),
    "remove_unused_columns": Here("", "a reward always gets every column of its row"),
    # verl, by the end of its path
    "actor.optim.lr": Here("optim.lr"),
    "critic.optim.lr": Here("critic.lr"),
    "critic.model.path": Here("critic.path"),
    "actor_rollout_ref.model.path": Here("model.path"),
    "train_files": Here("data.train"),
    "val_files": Here("data.eval"),
    "prompt_key": Here("data.prompt_column"),
    "max_response_length": Here("sampling.max_new_tokens"),
    "rollout.n": Here("sampling.n"),
    "rollout.name": Here("engine.name", "native, transformers or vllm; auto chooses"),
    "rollout.tensor_model_parallel_size": Here("engine.options.tensor_parallel_size"),
    "adv_estimator": Here("algorithm.advantage"),
    "ppo_mini_batch_size": _MINIBATCH,
    "ppo_epochs": Here("algorithm.epochs"),
    "ppo_micro_batch_size_per_gpu": Here("parallel.micro_batch_tokens", "it counts tokens, not rows"),
    "ppo_max_token_len_per_gpu": Here("parallel.micro_batch_tokens"),
    "clip_ratio": Here("algorithm.clip_low", "algorithm.clip_high is the upper bound"),
    "clip_ratio_low": Here("algorithm.clip_low"),
    "clip_ratio_high": Here("algorithm.clip_high"),
    "clip_ratio_c": Here("algorithm.dual_clip"),
    "loss_agg_mode": Here("algorithm.aggregation", "token-mean, sequence-mean or sequence-sum-constant"),
    "use_kl_loss": Here("algorithm.kl_in", "set it to loss"),
    "use_kl_in_reward": Here("algorithm.kl_in", "set it to reward"),
    "kl_loss_coef": _KL,
    "kl_loss_type": Here("algorithm.kl_estimator", "k1, k2 or k3; verl's low_var_kl is k3"),
    "entropy_coeff": Here("algorithm.entropy_coef"),
    "norm_adv_by_std_in_grpo": Here("algorithm.normalize_advantage"),
    "custom_reward_function.path": _NAME,
    "custom_reward_function.name": _NAME,
    "total_training_steps": Here("run.steps"),
    "total_epochs": Here("run.epochs"),
    "test_freq": Here("eval.every"),
    "save_freq": Here("save.every"),
    "n_gpus_per_node": Here("placement.ranks", "it counts the processes of all nodes"),
    "nnodes": Here("placement.ranks", "it counts the processes of all nodes; --backend ray finds the nodes"),
    "resume_mode": Here("run.resume", "auto resumes the run of run.name"),
    "experiment_name": Here("run.name"),
    "logger": Here("run.trackers", "a list: --run.trackers '[wandb]'"),
    "default_local_dir": Here("run.dir"),
}
"""By name, or by the end of a dotted path."""


def name_here(path: str) -> Here | None:
    """Return the answer to an unknown dotted ``path``: that of its longest end in ``NAMES``. None where none is there.

    >>> name_here("actor_rollout_ref.rollout.n")
    Here(key='sampling.n', remark='', otherwise='')
    """
    names = path.split(".")
    ends = (".".join(names[start:]) for start in range(len(names)))
    return next((NAMES[end] for end in ends if end in NAMES), None)
