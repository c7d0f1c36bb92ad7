"""Held-out prompts that are trained on as well, so that what a run gains on them says nothing of new prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from podium.rollout.tasks import EncodedExamples, Example
from podium.rollout.tasks.messages import message_text
from podium.runs.config import InferenceConfig
from podium.spelling import write_count
from podium.trainer.prompts import HeldOut


def describe_overlaps(
    config: InferenceConfig, training: Sequence[Example], held_out: Mapping[str, HeldOut]
) -> Iterator[str]:
    """Yield a sentence for each evaluation set with prompts that the training data have with the same answer.

    The tasks of environments are not compared: their text alone is not all that a model is given.
    """
    if config.environment.name:
        return
    sets = {name: [{*_identify(example)} for example in _examples_of(prompts)] for name, prompts in held_out.items()}
    wanted = set[str]().union(*(answers for rows in sets.values() for answers in rows))
    trained = wanted.intersection(chain.from_iterable(map(_identify, training))) if wanted else set[str]()
    for name, rows in sets.items():
        if count := sum(answers <= trained for answers in rows):
            source = f" of {name}" if len(sets) > 1 else ""
            yield (
                f"{count} of the {write_count(len(rows), 'held-out prompt')}{source} "
                f"{'is' if count == 1 else 'are'} also in the training data, with the same answer: a gain "
                "on them does not show a gain on unseen prompts; remove them from the training or the held-out data"
            )


def _examples_of(prompts: HeldOut) -> Iterable[Example]:
    return prompts.examples if isinstance(prompts, EncodedExamples) else (prompt.example for prompt in prompts)


def _identify(example: Example) -> Iterator[str]:
    """Yield a text for each answer of an example that is learned, which is equal for equal answers to equal messages:
    for each turn of the assistant of a conversation that is learned whole."""
    prompt = example.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    digest = hashlib.blake2b()
    for message in messages:
        if example.whole and message["role"] == "assistant":
            yield f"{digest.hexdigest()} {message_text(message)}"
        digest.update(json.dumps(message, sort_keys=True, default=str).encode())
    yield f"{digest.hexdigest()} {example.answer}"
