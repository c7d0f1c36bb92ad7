"""The routers of a mixture of experts: what they chose for each token, and how even the choices are.

Legend: M places of a micro-batch, K tokens with loss, L layers with experts, E experts of a layer, J experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from podium.data import fields
from podium.errors import ConfigError, DataError
from podium.models.loading import plain_model
from podium.training.micro_batches import MicroBatch
from podium.training.output_layer import replace_forward


class Route(NamedTuple):
    """What one router computed for M places: logits ``[M, E]``, and the experts ``[M, J]`` that it chose."""

    logits: Tensor
    experts: Tensor


class _Choice(TorchFunctionMode):
    """In place of the experts with the largest values, a router takes these, ``[M, J]``, with their values."""

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self.experts, self.calls = experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if args[0].shape[:-1] != self.experts.shape[:-1]:
            return func(*args, **(kwargs or {}))
        return torch.return_types.topk((args[0].gather(-1, self.experts), self.experts))


def find_routers(model: nn.Module, option: str = "router_balance") -> list[nn.Module]:
    """Return the routers of ``model``, layer by layer.

    Raises:
        ConfigError: It has none whose probabilities are a softmax, for which the auxiliary loss is defined.
    """
    plain: Any = plain_model(model)
    routers = [module for module in plain.modules() if type(module).__name__.endswith("TopKRouter")]
    if not routers or not hasattr(plain.config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"algorithm.options.{option}: {type(plain).__name__} is no mixture of experts that is trained with "
            "an auxiliary loss (its configuration has no router_aux_loss_coef): leave the option out"
        )
    return routers


@contextmanager
def record_routes(model: nn.Module, option: str = "router_balance") -> Iterator[list[Route]]:
    """Record what the routers compute during the block, with gradients.

    Raises:
        ConfigError: see :func:`find_routers`; or a router does not return logits, weights and choices.
    """
    routes = list[Route]()

    def record(router: nn.Module, _args: object, output: Any) -> None:
        if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
            raise ConfigError(
                f"algorithm.options.{option}: {type(router).__name__} does not return logits, weights and "
                "choices: leave the option out"
            )
        routes.append(Route(output[0].flatten(0, -2), output[2].flatten(0, -2)))

    with ExitStack() as hooks:
        for router in find_routers(model, option):
            hooks.enter_context(router.register_forward_hook(record))
        yield routes


def count_experts(model: nn.Module) -> int:
    """The number of experts that all routers choose for a token, the width of the column ``experts``."""
    return sum(int(getattr(router, "top_k", 0)) for router in find_routers(model, "router_replay"))


def note_choices(experts_NC: Tensor | None, routes: Sequence[Route], micro: MicroBatch, count: int) -> Tensor:
    """Write what the routers chose for a micro-batch's tokens to the column ``experts`` of N = ``count`` tokens."""
    chosen_MC = torch.cat([route.experts for route in routes], -1).to("cpu", torch.int16)
    if experts_NC is None:
        experts_NC = chosen_MC.new_zeros(count, chosen_MC.shape[1])
    experts_NC[micro.input_index.cpu()] = chosen_MC[micro.input_places.cpu()]
    return experts_NC


@contextmanager
def replay_routes(model: nn.Module, experts_NC: Tensor) -> Iterator[Callable[[MicroBatch], None]]:
    """Let the routers choose what they chose before, in forward passes of the block and when backward passes repeat
    them. Weights of the experts and gradients are those of the current logits: Ma et al. 2025, arXiv:2510.11370.

    Args:
        experts_NC: The column ``experts`` of the batch.

    Yields:
        A function that takes the micro-batch of the next pass. Where its rows share the tokens of a prompt, the first
        row's experts are taken.

    Raises:
        ConfigError: see :func:`find_routers`; or a router does not choose by one ``topk``.
        DataError: The column is not that of this model.
    """
    routers, chosen = find_routers(model, "router_replay"), list[Tensor]()
    if experts_NC.shape[-1] % len(routers):
        raise DataError(f"{fields.EXPERTS} has {experts_NC.shape[-1]} columns; the model has {len(routers)} routers")

    def choose(micro: MicroBatch) -> None:
        places, index = micro.input_places, micro.input_index
        first_M = index.new_full((micro.input_ids.numel(),), len(experts_NC))  # padding has no row
        first_M.scatter_reduce_(0, places, index, "amin")
        first_M[first_M == len(experts_NC)] = first_M.amin()
        experts_MC = experts_NC[first_M.to(experts_NC.device)].to(first_M.device).long()
        chosen[:] = experts_MC.chunk(len(routers), -1)

    def forward(layer: int, former: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not chosen or (hidden.flatten(0, -2).shape[0] == 1 != len(chosen[layer])):
            return former(hidden, *args, **kwargs)  # a pass that only takes part in collectives
        with _Choice(chosen[layer]) as choice:
            output = former(hidden, *args, **kwargs)
        if choice.calls != 1:
            name = type(routers[layer]).__name__
            raise ConfigError(
                f"algorithm.options.router_replay: {name} does not choose by one topk: leave the option out"
            )
        return output

    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            former = router.forward
            stack.enter_context(replace_forward(router, partial(forward, layer, former)))
        yield choose


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
