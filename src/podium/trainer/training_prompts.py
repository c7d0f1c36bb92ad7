"""The prompts that a run of reinforcement learning trains on, and what is checked of them before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from podium.algorithms import ADVANTAGES
from podium.rollout.environments import load_sessions
from podium.rollout.tasks import PromptStream, load_examples
from podium.trainer.checks.other_models import check_other_models
from podium.trainer.checks.preflight import check_answers, check_columns, check_lengths, check_tokens, find_fitting
from podium.trainer.prompts import Prompt, Prompts, Tasks, encode_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.rewards import Rewards
    from podium.runs.config import PPOConfig


def load_training(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, reward: Rewards | None
) -> PromptStream[Prompt]:
    """Read and encode the training prompts, or the tasks of an environment, and check that the model takes them.

    ``reward`` is what a script gives to grade them in place of ``config.reward.name``.

    Raises:
        ConfigError, DataError: The run is refused for its data.
    """
    data, seed = config.data, config.run.seed
    if config.environment.name:
        sessions = load_sessions(config.environment.shown)
        sessions.check_conversations(tokenizer, data)
        return PromptStream[Prompt].of(sessions.load_tasks(data, config.environment, "train", seed), data, seed)
    evaluates = bool(config.eval.items or config.engine.replayed_run)  # a replay has no evaluations
    examples = load_examples(data.train, data, "train", seed, evaluates=evaluates)
    prompts = encode_rows(examples, tokenizer, data, "training")
    lengths = prompts.token_ids.lengths
    kept = find_fitting(config.model, data, "training", lengths, prompts.examples, max_new_tokens)
    prompts = prompts if kept is None else prompts.take(kept)
    check_answers(prompts.examples, config.reward, reward)
    check_tokens(config.model, "training", int(prompts.token_ids.values.max()))
    check_lengths(config.model, max_new_tokens, "training", prompts.token_ids.lengths, prompts.examples)
    return PromptStream[Prompt].of(prompts, data, seed)


def check_training(
    config: PPOConfig, stream: PromptStream[Prompt], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> None:
    """Check that the advantage estimator finds its columns in the prompts, and that teacher and critic take them.

    Raises:
        ConfigError: The estimator, the teacher or the critic does not fit.
    """
    rows = cast("Prompts | Tasks", stream.examples)
    check_columns(rows.examples, ADVANTAGES.declaration(config.algorithm.advantage).data, config.algorithm.advantage)
    longest = None if isinstance(rows, Tasks) else max(rows.token_ids.lengths) + max_new_tokens
    check_other_models(config, tokenizer, longest)
