"""A generation engine of your own in one file: a forward pass over the whole sequence for each token, without a cache.

It is slow and short. An engine that keeps the contract of `podium_testing.engines` serves any run
of Podium by its name.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from podium.rollout.engines import EngineConfig, Event, ModelEngine, Request, RequestId, Tokens, conclude
from podium.rollout.engines.draw import draw, leave_out, uniforms


@dataclass(eq=False)
class Row:
    """A request that the engine has begun, and what has been drawn for it."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


class PlainEngine(ModelEngine):
    """Draws one token of each request in a call of `advance`. New weights come in between two tokens."""

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        self.begun: dict[RequestId, Row] = {}

    @classmethod
    def supports(cls, model: nn.Module) -> str | None:
        """Return why the engine cannot run `model`, or None when it can."""
        return None if hasattr(model, "config") else f"{type(model).__name__} is no model of transformers"

    def drop(self, ids: Collection[RequestId]) -> None:
        """End the work on requests that were aborted."""
        self.begun = {id: row for id, row in self.begun.items() if id not in ids}

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        """Begin waiting requests where there is room, and draw one token of each request."""
        room = self.config.max_sequences - len(self.begun)
        self.begun |= {request.id: Row(request) for request in self.waiting.take(room)}
        events: list[Event] = []
        for row in list(self.begun.values()):
            request, params = row.request, row.request.params
            with self.gate:  # no new weights come during this block
                version = self.version
                logits_BV = self._logits([*request.prompt, *row.ids])
            number_B = uniforms(torch.tensor([request.seed]), start=len(row.ids), count=1)[:, 0]
            drawn = draw(leave_out(logits_BV, self.text_ids), params, number_B)
            row.ids.append(int(drawn.ids_B))
            row.logprobs.append(float(drawn.logprobs_B))
            row.versions.append(version)
            if drawn.kept_ids_BK is not None and drawn.kept_sizes_B is not None:  # top-k or top-p
                row.kept.append(drawn.kept_ids_BK[0, : int(drawn.kept_sizes_B)])
            if request.stream:
                events.append(Tokens(request.id, row.ids[-1:], row.logprobs[-1:], version))
            if row.ids[-1] in params.stop_token_ids or len(row.ids) == params.max_new_tokens:
                del self.begun[request.id]
                ids_L, logprobs_L, versions_L = map(torch.tensor, (row.ids, row.logprobs, row.versions))
                events.append(conclude(request, ids_L, logprobs_L, versions_L, row.kept or None))
        return events

    def _logits(self, sequence: list[int]) -> Tensor:
        """float32 `[1, vocabulary]` on the CPU, for the token after `sequence`."""
        device = next(self.model.parameters()).device
        output: Any = self.model(input_ids=torch.tensor([sequence], device=device), use_cache=False)
        return output.logits[:, -1].float().cpu()
