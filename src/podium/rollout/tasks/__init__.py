"""Where prompts come from: files, hub datasets, generated tasks; how they are written, and in which order taken."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.rollout.tasks.config import DataConfig as DataConfig
    from podium.rollout.tasks.encode import (
        EncodedExamples as EncodedExamples,
        EncodedPairs as EncodedPairs,
        EncodedPrompts as EncodedPrompts,
        TokenRows as TokenRows,
        encode_pairs as encode_pairs,
        encode_prompts as encode_prompts,
        end_of_turn as end_of_turn,
    )
    from podium.rollout.tasks.examples import check_data as check_data, load_examples as load_examples
    from podium.rollout.tasks.forms import Example as Example
    from podium.rollout.tasks.messages import Messages as Messages
    from podium.rollout.tasks.stream import PromptStream as PromptStream
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
