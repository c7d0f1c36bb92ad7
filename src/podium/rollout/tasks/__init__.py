"""Where prompts come from: files, hub datasets, generated tasks; how they are written, and in which order taken."""

from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.encode import EncodedPrompts, encode_pairs, encode_prompts
from podium.rollout.tasks.examples import Example, Messages, check_data, load_examples
from podium.rollout.tasks.stream import PromptStream

__all__ = [
    "DataConfig",
    "EncodedPrompts",
    "Example",
    "Messages",
    "PromptStream",
    "check_data",
    "encode_pairs",
    "encode_prompts",
    "load_examples",
]
