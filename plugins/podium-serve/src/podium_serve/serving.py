"""A model that answers the OpenAI API during a block: see :mod:`podium_serve`.

one rank       client ─▶ its service
several        client ─▶ load balancer ─▶ the service of a rank
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from podium.errors import PodiumError
from podium.models import load_tokenizer
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks.templates import chat_template
from podium.runs.config import InferenceConfig
from podium.runs.paths import resolve_models
from podium.runtime import Cluster, Handle
from podium.trainer.checks.preflight import with_stop_tokens
from podium.workers import Generator
from podium_inference.roles import start_generator
from podium_serve import check_serving, serve_load_balancer

__all__ = ["ServedModel", "serve_model"]

_LOOK_S: Final = 0.2  # between two checks that the workers live


@dataclass(frozen=True)
class ServedModel:
    """A model that answers over HTTP.

    Attributes:
        url: Address of the service, such as ``http://127.0.0.1:43210``; the OpenAI API is below ``/v1``.
        generator: The workers that hold the model.
        chats: Whether the model has a chat template and therefore answers conversations too.
    """

    url: str
    generator: Handle[Generator]
    chats: bool

    def wait(self) -> None:
        """Wait until a worker is lost, and then raise PodiumError."""
        while not (lost := self.generator.group.lost):
            time.sleep(_LOOK_S)
        rank, cause = next(iter(lost.items()))
        raise PodiumError(f"the generator's worker of rank {rank} is lost: {cause}")


@contextmanager
def serve_model(
    config: InferenceConfig, cluster: Cluster, *, model: str, token: str, host: str, port: int
) -> Iterator[ServedModel]:
    """As :func:`podium_serve.served`."""
    check_serving(host, port, token)
    config = resolve_models(config)
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    config = replace(config, reward=replace(config.reward, path=""), environment=EnvironmentConfig())
    chats = chat_template(tokenizer, config.data) is not None
    with start_generator(cluster, config) as roles:
        generator = roles.generator
        if generator.group.world_size == 1:
            (url,) = generator.serve(config.data, sampling, model=model, token=token, host=host, port=port)
            yield ServedModel(url, generator, chats)
            return
        urls = generator.serve(config.data, sampling, model=model, token=token)
        with serve_load_balancer(urls, token=token, host=host, port=port) as balancer:
            yield ServedModel(balancer.url, generator, chats)
