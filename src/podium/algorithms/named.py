"""Advantage estimators and losses that a configuration names, and what they declare about themselves.

This module imports no torch: a table has the declarations of Podium's own estimators, and a user's are loaded when
needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from pydantic.dataclasses import is_pydantic_dataclass

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.functions import load_function

if TYPE_CHECKING:
    from torch import Tensor

    from podium.algorithms.config import AlgorithmConfig
    from podium.algorithms.records import AdvantageInputs, AdvantageOutputs, LossInputs, TokenLoss

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AdvantageEstimator",
    "Declaration",
    "Loss",
    "MinibatchFigures",
    "advantage_declaration",
    "check_functions",
    "loss_declaration",
    "loss_imitates",
    "resolve_advantage",
    "resolve_loss",
]

AdvantageEstimator: TypeAlias = "Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]"
Loss: TypeAlias = "Callable[[LossInputs, AlgorithmConfig], TokenLoss]"
MinibatchFigures: TypeAlias = "Callable[[LossInputs, AlgorithmConfig], Mapping[str, Tensor]]"
F = TypeVar("F", bound=Callable[..., Any])

COLUMNS: Final = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
"""Token columns that an advantage estimator may declare."""

_ATTRIBUTE: Final = "podium_declaration"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What an advantage estimator or a loss needs besides the usual: a decorator for a function of your own.

    >>> @Declaration(needs_groups=True)
    ... def best_of_group(inputs, config): ...

    Attributes:
        options: A class under ``@section("algorithm.options")`` with the options that the function reads by
            ``config.read_options``.
        needs_values: The estimator reads a critic's values, so that the trainer starts a critic.
        needs_groups: The estimator compares the completions of a prompt, so that each prompt needs two or more.
        columns: The token columns of :data:`COLUMNS` that the estimator reads.
        data: The columns of the data that the estimator reads in ``inputs.data``.
        minibatch: The loss reads ``inputs.figures``, which this function computes from the tokens of a whole minibatch.
        imitates: The loss learns from examples and not from rewards. So dropout is on unless ``model.dropout`` says
            otherwise.
    """

    options: type | None = None
    needs_values: bool = False
    needs_groups: bool = False
    columns: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    minibatch: MinibatchFigures | None = None
    imitates: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.columns) - set(COLUMNS):
            raise ConfigError(f"Declaration.columns has {sorted(unknown)}: expected some of {', '.join(COLUMNS)}")
        if self.options is not None and not is_pydantic_dataclass(self.options):
            name = getattr(self.options, "__name__", repr(self.options))
            raise ConfigError(
                f"Declaration.options = {name}, which is no section: decorate the class {name} with "
                '@section("algorithm.options") from podium.config'
            )

    def __call__(self, function: F) -> F:
        """Attach this declaration to ``function``, and return ``function``."""
        setattr(function, _ATTRIBUTE, self)
        return function


# What Podium's own functions declare where they are defined, so that it is known without importing torch.
_OWN_ADVANTAGES: Final[Mapping[str, Declaration]] = {
    "grpo": Declaration(needs_groups=True),
    "rloo": Declaration(needs_groups=True),
    "reinforce_pp": Declaration(),
    "gae": Declaration(needs_values=True),
    "grpo_turns": Declaration(needs_groups=True),
    "gae_turns": Declaration(needs_values=True),
}
_OWN_LOSSES: Final[Mapping[str, bool]] = {  # whether it imitates
    "ppo_clip": False,
    "gspo": False,
    "clip_cov": False,
    "cross_entropy": True,
}

ADVANTAGES: Final[Mapping[str, str]] = {name: f"podium.algorithms.advantages.{name}:{name}" for name in _OWN_ADVANTAGES}
"""Podium's own advantage estimators by name, and where each is."""

LOSSES: Final[Mapping[str, str]] = {name: f"podium.algorithms.losses.{name}:{name}" for name in _OWN_LOSSES}
"""Podium's own losses by name, and where each is."""


def resolve_advantage(spec: str) -> AdvantageEstimator:
    """Return the estimator that ``spec`` names. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return load_function(spec, key="algorithm.advantage", known=ADVANTAGES)


def resolve_loss(spec: str) -> Loss:
    """Return the loss that ``spec`` names. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return load_function(spec, key="algorithm.loss", known=LOSSES)


def advantage_declaration(spec: str) -> Declaration:
    """Return what the estimator declares. Raises ConfigError as :func:`resolve_advantage` does."""
    estimator = _OWN_ADVANTAGES.get(spec)
    return getattr(resolve_advantage(spec), _ATTRIBUTE, Declaration()) if estimator is None else estimator


def loss_declaration(spec: str) -> Declaration:
    """Return what the loss declares. Raises ConfigError as :func:`resolve_loss` does."""
    return getattr(resolve_loss(spec), _ATTRIBUTE, Declaration())


def loss_imitates(spec: str) -> bool:
    """Whether the loss learns from examples. Raises ConfigError as :func:`resolve_loss` does."""
    loss = _OWN_LOSSES.get(spec)
    return loss_declaration(spec).imitates if loss is None else loss


def check_functions(config: AlgorithmConfig) -> None:
    """Load what the user wrote, and check ``algorithm.options`` against what estimator and loss declare.

    Raises:
        ConfigError: A function cannot be found or does not take two positional arguments; an estimator reads the
            reference policy, and there is none; or an option is unknown, which names the nearest, or out of its range.
    """
    declared = [advantage_declaration(config.advantage)]
    if "ref_logprobs" in declared[0].columns and not config.needs_reference:
        raise ConfigError(
            f"algorithm.advantage = {config.advantage!r} reads ref_logprobs with algorithm.kl_in = 'none', which "
            "keeps no reference policy: set kl_in to 'loss', and kl_coef to 0 if the KL is not to count"
        )
    if config.advantage not in ADVANTAGES:
        _check_arguments(resolve_advantage(config.advantage), f"algorithm.advantage = {config.advantage!r}")
    if config.loss not in LOSSES:
        _check_arguments(resolve_loss(config.loss), f"algorithm.loss = {config.loss!r}")
    if config.options or config.loss not in LOSSES:
        declared.append(loss_declaration(config.loss))
    sections = [declaration.options for declaration in declared if declaration.options is not None]
    names = [field.name for section in sections for field in fields(section)]
    for name, value in config.options.items():
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean algorithm.options.{near[0]}?" if near else f"the options are {', '.join(names)}"
        if not sections:
            hint = (
                "neither declares options; a function of your own declares a class of them, which is decorated "
                'with @section("algorithm.options"), by @Declaration(options=CLASS)'
            )
        raise ConfigError(
            f"unknown key algorithm.options.{name} (value {value!r}) with algorithm.advantage = "
            f"{config.advantage!r} and algorithm.loss = {config.loss!r}: {hint}"
        )
    for section in sections:
        config.read_options(section)


def _check_arguments(function: Callable[..., Any], subject: str) -> None:
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # Some functions that are not written in Python have no signature.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{subject}: the function is called with two positional arguments, (inputs, config), and its signature "
            f"is {signature}: {error}"
        ) from None
