"""What the model suites run: shapes of models, prompts and lengths, the same for Podium and for every peer.

Standard library only: peers get these numbers over their protocol, and build their own objects from them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=<>()[]{}.,:;!?@#$%&"
SPECIALS = 4  # ids below the alphabet's: padding is 0, the others never occur in a prompt
assert len(ALPHABET) == 60


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of the Qwen3 family, by its sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def config(self) -> dict[str, Any]:
        """Arguments of transformers.Qwen3Config. No token ends a completion: all run to their full length."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }


# Parameters: 0.85, 9.8, 95 and 134.5 million. The smallest knows the alphabet and the special ids; the last has the
# sizes of SmolLM2-135M.
SHAPES = {
    "1m": Shape(
        hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=416, vocabulary=SPECIALS + len(ALPHABET)
    ),
    "10m": Shape(hidden=384, layers=6, heads=6, kv_heads=2, head_dim=64, intermediate=1024, vocabulary=1024),
    "100m": Shape(hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, intermediate=2304, vocabulary=16384),
    "135m": Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152),
}


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """One GRPO step: `prompts` prompts of `prompt_tokens` tokens, `completions` completions each of `new_tokens`."""

    shape: str = "1m"
    path: str = ""  # a directory that has the model's weights; without one they are random
    prompts: int = 16
    completions: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 64
    learning_rate: float = 1e-4
    temperature: float = 1.0
    seed: int = 0
    ranks: int = 2  # of Podium, which share two threads

    @property
    def unused_id(self) -> int:
        """An id beyond the vocabulary: as the end of sequence it lets every completion run to its full length."""
        return SHAPES[self.shape].vocabulary

    @property
    def tokens(self) -> int:
        """Completion tokens of one step."""
        return self.prompts * self.completions * self.new_tokens

    def as_arguments(self) -> dict[str, Any]:
        """What a peer needs, as JSON."""
        return {**asdict(self), "config": SHAPES[self.shape].config(), "alphabet": ALPHABET, "specials": SPECIALS}


def prompt_texts(count: int, length: int, seed: int = 0) -> list[str]:
    """`count` random prompts of `length` letters, one token each."""
    source = random.Random(seed)
    return ["".join(source.choices(ALPHABET, k=length)) for _ in range(count)]


def reward(completion: str, example: Mapping[str, Any]) -> float:
    """The share of letters `a`: something to learn that costs nothing to score."""
    del example
    return completion.count("a") / max(len(completion), 1)


def allow_unused_stop() -> None:
    """Let a run of this process have a stop token that is never sampled, so that all completions have full length. A
    user's run is refused then."""
    from podium.trainer.checks import preflight

    preflight.check_vocabulary = lambda *_: None
