"""The routers of a mixture of experts: what they chose for each token, and how even the choices are.

Legend: M places of a micro-batch, K tokens with loss, L layers with experts, E experts of a layer, J experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.models.loading import plain_model

__all__ = ["Route", "count_choices", "find_routers", "measure_balance", "record_routes"]


class Route(NamedTuple):
    """What one router computed for M places: logits ``[M, E]``, and the experts ``[M, J]`` that it chose."""

    logits: Tensor
    experts: Tensor


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of ``model``, layer by layer.

    Raises:
        ConfigError: It has none whose probabilities are a softmax, for which the auxiliary loss is defined.
    """
    plain: Any = plain_model(model)
    routers = [module for module in plain.modules() if type(module).__name__.endswith("TopKRouter")]
    if not routers or not hasattr(plain.config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"algorithm.options.router_balance: {type(plain).__name__} is no mixture of experts that is trained with "
            "an auxiliary loss (its configuration has no router_aux_loss_coef): leave the option out"
        )
    return routers


@contextmanager
def record_routes(model: nn.Module) -> Iterator[list[Route]]:
    """Record what the routers compute during the block, with gradients.

    Raises:
        ConfigError: see :func:`find_routers`; or a router does not return logits, weights and choices.
    """
    routes = list[Route]()

    def record(router: nn.Module, _args: object, output: Any) -> None:
        if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
            raise ConfigError(
                f"algorithm.options.router_balance: {type(router).__name__} does not return logits, weights and "
                "choices: leave the option out"
            )
        routes.append(Route(output[0].flatten(0, -2), output[2].flatten(0, -2)))

    with ExitStack() as hooks:
        for router in find_routers(model):
            hooks.enter_context(router.register_forward_hook(record))
        yield routes


def count_choices(routes: Sequence[Route], places_K: Tensor) -> Tensor:
    """How often each expert was chosen at these places, float64 ``[L, E]``."""
    return torch.stack(
        [route.experts[places_K].flatten().bincount(minlength=route.logits.shape[-1]).double() for route in routes]
    )


def measure_balance(routes: Sequence[Route], places_K: Tensor, shares_LE: Tensor) -> Tensor:
    """``E · sum_e f_e p_e`` at each place, averaged over the layers, float32 ``[K]``, with gradients of p.

    f are the experts' shares of the choices and p the router's probabilities, so that the mean over tokens is 1 if both
    are even: Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, equations 4 to 6. f is over all tokens of the
    minibatch, as in Qiu et al. 2025, "Demons in the Detail", arXiv:2501.11873; with J experts a token it is divided by
    J, so that it sums to 1. The function of transformers does not, and its value is J times this one.
    """
    terms = [
        route.logits.shape[-1] * (route.logits[places_K].float().softmax(-1) * shares_E.float()).sum(-1)
        for route, shares_E in zip(routes, shares_LE, strict=True)
    ]
    return torch.stack(terms).mean(0)
