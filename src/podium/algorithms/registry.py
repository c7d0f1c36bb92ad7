"""The advantage estimators and losses that a configuration names, and the check of their options. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

from podium.algorithms.declarations import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    RATIO_CORRECTIONS,
    CenteringOptions,
    CriticOptions,
    Declaration,
    ReferenceOptions,
    RouterOptions,
    TeacherOptions,
    advantage_declaration,
    correction_declaration,
    correction_ratio_to,
    correction_weighs,
    loss_declaration,
    loss_ratio_to,
    loss_scales_advantage,
)
from podium.annotations import signature_of
from podium.config import build_config
from podium.errors import ConfigError
from podium.functions import load_function

if TYPE_CHECKING:
    from torch import Tensor

    from podium.algorithms.config import AlgorithmConfig
    from podium.algorithms.records import AdvantageInputs, AdvantageOutputs, LossInputs, TokenLoss

__all__ = [
    "AdvantageEstimator",
    "Correction",
    "Loss",
    "MinibatchFigures",
    "check_functions",
    "resolve_advantage",
    "resolve_correction",
    "resolve_loss",
]

AdvantageEstimator: TypeAlias = "Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]"
Loss: TypeAlias = "Callable[[LossInputs, AlgorithmConfig], TokenLoss]"
Correction: TypeAlias = "Callable[[LossInputs, AlgorithmConfig], Tensor]"
MinibatchFigures: TypeAlias = "Callable[[LossInputs, AlgorithmConfig], Mapping[str, Tensor]]"


def resolve_advantage(spec: str) -> AdvantageEstimator:
    """Return the estimator that ``spec`` names. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return load_function(spec, key="algorithm.advantage", known=ADVANTAGES)


def resolve_loss(spec: str) -> Loss:
    """Return the loss that ``spec`` names. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return load_function(spec, key="algorithm.loss", known=LOSSES)


def resolve_correction(spec: str) -> Correction:
    """Return the correction that ``spec`` names. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return load_function(spec, key="algorithm.correction", known=CORRECTIONS)


def check_functions(config: AlgorithmConfig) -> None:
    """Load what the user wrote, and check ``algorithm.options`` against what estimator and loss declare.

    Raises:
        ConfigError: A function cannot be found or does not take two positional arguments; an estimator reads the
            reference policy, and the configuration has none; or an option is unknown or out of range. The message names
            the nearest option.
    """
    declared = [advantage_declaration(config.advantage)]
    if "ref_logprobs" in declared[0].columns and not config.needs_reference:
        raise ConfigError(
            f"algorithm.advantage = {config.advantage!r} reads ref_logprobs with algorithm.kl_in = 'none', which "
            "keeps no reference policy: set kl_in to 'loss'; with kl_coef 0 the KL is measured and not added to the "
            "loss"
        )
    if config.advantage not in ADVANTAGES:
        _check_arguments(resolve_advantage(config.advantage), f"algorithm.advantage = {config.advantage!r}")
    for name in config.losses:
        if name not in LOSSES:
            _check_arguments(resolve_loss(name), f"algorithm.loss = {name!r}")
        if config.options or name not in LOSSES:
            declared.append(loss_declaration(name))
    if config.needs_teacher:
        declared.append(Declaration(options=TeacherOptions))
        if not config.teacher.teacher:
            raise ConfigError(
                f"algorithm.loss = {config.loss!r} learns from a teacher, and there is none: set "
                "algorithm.options.teacher to the directory, the run or the hub name of its model"
            )
    if config.needs_reference:
        declared.append(Declaration(options=ReferenceOptions))
    declared += [Declaration(options=RouterOptions)] * bool({"router_balance", "router_replay"} & config.options.keys())
    declared += [Declaration(options=CenteringOptions)] * ("score_centering" in config.options)
    declared += [Declaration(options=CriticOptions)] * declared[0].needs_values
    _check_critic(config)
    _check_replay(config)
    _check_centering(config)
    declared += _check_corrections(config)
    for declaration in declared:
        build_config(type(config), declaration.defaults, key="Declaration.defaults")
    sections = dict.fromkeys(declaration.options for declaration in declared if declaration.options is not None)
    _check_options(config, [*sections])


def _check_critic(config: AlgorithmConfig) -> None:
    """Check that a coefficient of the value loss has a loss that it is added to."""
    if config.critic.critic_trunk == "separate" and "value_coef" in config.options:
        raise ConfigError(
            f"algorithm.options.value_coef = {config.options['value_coef']} with critic_trunk = 'separate', whose "
            "critic has an optimizer of its own: set critic_trunk to shared or detached, or leave value_coef out"
        )


def _check_replay(config: AlgorithmConfig) -> None:
    """Check that there is a pass before the updates of which a mixture of experts replays the choices."""
    if config.router_replay == "old" and (config.updates == 1 or config.ratio_to == "rollout"):
        raise ConfigError(
            "algorithm.options.router_replay = 'old': the policy computes no log-probabilities before the update with "
            "one optimizer step a batch (epochs and minibatches 1), or with a loss or correction whose ratio is to the "
            "generator; expected more updates, or router_replay: rollout"
        )


def _check_centering(config: AlgorithmConfig) -> None:
    """Check that the score of each token is centered under the weight with which it is trained."""
    if not config.score_centering:
        return
    what = f"algorithm.options.score_centering = {config.score_centering} with algorithm."
    if config.updates > 1:
        raise ConfigError(
            f"{what}epochs = {config.epochs!r} and minibatches = {config.minibatches}: the ratios of later "
            "optimizer steps are not centered; set both to 1"
        )
    if config.ratio_to == "rollout" or not any(map(loss_scales_advantage, config.sampled_losses)):
        raise ConfigError(
            f"{what}loss = {config.loss!r} and correction = {config.correction!r}: it centers the score in a loss of "
            "which the advantage is a factor (scales_advantage), and whose ratio is not to the generator, which needs "
            "no centering; choose ppo_clip, reinforce or cispo, for example"
        )
    if others := sorted({*config.corrections} - {*RATIO_CORRECTIONS}):
        raise ConfigError(
            f"{what}correction = {others[0]!r}: the weight of a token that was not sampled is known for "
            f"{', '.join(RATIO_CORRECTIONS)} alone; choose one of them, or none"
        )


def _check_corrections(config: AlgorithmConfig) -> Sequence[Declaration]:
    """Check the corrections, and return what they declare if the configuration has options."""
    for name in config.corrections:
        if name not in CORRECTIONS:
            _check_arguments(resolve_correction(name), f"algorithm.correction = {name!r}")
    weighing = sorted(filter(correction_weighs, config.corrections))
    bypassing = [name for name in config.corrections if correction_ratio_to(name) == "rollout"]
    if weighing and "rollout" in (config.ratio_to, *map(loss_ratio_to, config.losses)):
        which = f"the correction {bypassing[0]}" if bypassing else f"algorithm.loss = {config.loss!r}"
        raise ConfigError(
            f"algorithm.correction = {config.correction!r} with {which}, whose ratio is to the generator already: the "
            f"importance weights of {weighing[0]} would count twice; leave it out"
        )
    if len(weighing) > 1:
        raise ConfigError(
            f"algorithm.correction = {list(config.corrections)}: {' and '.join(weighing)} are importance weights of "
            "the same tokens, and their product would count the difference more than once: keep one of them, beside "
            "masks such as two_sided, geometric and trust_region"
        )
    if not config.options:
        return []
    return [
        correction_declaration(name) for name in (("truncate",) if config.correction == "auto" else config.corrections)
    ]


def _check_options(config: AlgorithmConfig, sections: Sequence[type]) -> None:
    names = [field.name for section in sections for field in fields(section)]
    for name, value in config.options.items():
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean algorithm.options.{near[0]}?" if near else f"the options are {', '.join(names)}"
        if not sections:
            hint = (
                "none of them declares options. To give your own function options, decorate a class with "
                '@section("algorithm.options"), and the function with @Declaration(options=CLASS)'
            )
        raise ConfigError(
            f"unknown key algorithm.options.{name} (value {value!r}) with algorithm.advantage = "
            f"{config.advantage!r}, algorithm.loss = {config.loss!r} and algorithm.correction = {config.correction!r}: "
            f"{hint}"
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
            f"{subject}: the function is called with two positional arguments, (inputs, config), but its signature "
            f"is {signature}: {error}"
        ) from None
