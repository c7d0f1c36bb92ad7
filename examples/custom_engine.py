"""A generation engine of your own in one file: a forward pass over the whole sequence for each token, without a cache.

It is slow and short. An engine that keeps the contract of `podium.testing.engines` serves any run
of Podium by its name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from podium.rollout.engines import Event, ModelEngine, Request, Tokens, conclude
from podium.rollout.engines.draw import draw, uniforms


class PlainEngine(ModelEngine):
    """Draws one completion at a time. New weights come in between two tokens."""

    @classmethod
    def supports(cls, model: nn.Module) -> str | None:
        """Return why the engine cannot run ``model``, or None when it can."""
        return None if hasattr(model, "config") else f"{type(model).__name__} is no model of transformers"

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        """Draw the whole completion of the request that waits longest."""
        (request,) = self.waiting.take(1)
        params = request.params
        numbers = uniforms(torch.tensor([request.seed]), 0, params.max_new_tokens)  # one in [0, 1) for each token
        ids: list[int] = []
        logprobs: list[Tensor] = []
        versions: list[int] = []
        kept: list[Tensor] = []
        for position in range(params.max_new_tokens):
            with self.gate:  # no new weights during the forward pass
                versions.append(self.version)
                logits_BV = self._logits([*request.prompt, *ids])
            drawn = draw(logits_BV, params, numbers[:, position])
            ids.append(int(drawn.ids_B))
            logprobs.append(drawn.logprobs_B.cpu())
            if drawn.kept_ids_BK is not None and drawn.kept_sizes_B is not None:  # top-k or top-p
                kept.append(drawn.kept_ids_BK[0, : int(drawn.kept_sizes_B)].cpu())
            if ids[-1] in params.stop_token_ids:
                break
        return self._told(request, ids, torch.cat(logprobs), versions, kept)

    def _logits(self, sequence: list[int]) -> Tensor:
        """float32 ``[1, vocabulary]``, of the token after ``sequence``."""
        device = next(self.model.parameters()).device
        output: Any = self.model(input_ids=torch.tensor([sequence], device=device), use_cache=False)
        return output.logits[:, -1].float().cpu()

    def _told(
        self, request: Request, ids: list[int], logprobs_L: Tensor, versions: list[int], kept: list[Tensor]
    ) -> list[Event]:
        last = conclude(request, torch.tensor(ids), logprobs_L, torch.tensor(versions), kept or None)
        if not request.stream:
            return [last]
        parts = zip(ids, logprobs_L.tolist(), versions, strict=True)
        return [*(Tokens(request.id, [token], [logprob], version) for token, logprob, version in parts), last]
