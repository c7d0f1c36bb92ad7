"""Whether a reward model reads the prompts as the policy does."""

from collections.abc import Iterable

from podium.rollout.tasks import Example
from podium.runs.config import InferenceConfig


def check_scored(config: InferenceConfig, examples: Iterable[Example]) -> None:
    """Check that the tokenizer of ``reward.path`` can be read, and that its chat template writes the prompts.

    Args:
        config: The configuration. Without ``reward.path`` nothing is checked.
        examples: The prompts whose completions are scored, or the tasks of an environment.

    Raises:
        ConfigError: There is no such tokenizer, or none of its chat templates is the default.
        DataError: The template leaves out a part of a prompt, or its tools.
    """
    if "reward" not in config.roles:
        return
    from podium.workers.reward_model import load_scorer_encoder  # imports models, which few runs need here

    encoder = load_scorer_encoder(config.reward.path, config.data.system_prompt)
    for example in examples:
        encoder.check_prompt(example, in_session=bool(config.environment.name))
