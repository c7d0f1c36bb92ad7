"""The check of the functions and options that a configuration names, before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from podium.algorithms.declarations import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    CenteringOptions,
    CriticOptions,
    Declaration,
    NamedFunctions,
    ReferenceOptions,
    RouterOptions,
    TeacherOptions,
)
from podium.annotations import signature_of
from podium.config import build_config
from podium.errors import ConfigError
from podium.spelling import suggest_nearest

if TYPE_CHECKING:
    from podium.algorithms.config import AlgorithmConfig


def check_functions(config: AlgorithmConfig) -> None:
    """Load what the user wrote, and check ``algorithm.options`` against what estimator and loss declare.

    Raises:
        ConfigError: A function cannot be found or does not take two positional arguments; an estimator reads the
            reference policy, and the configuration has none; or an option is unknown or out of range. The message names
            the nearest option.
    """
    estimator = ADVANTAGES.declaration(config.advantage)
    if "ref_logprobs" in estimator.columns and not config.needs_reference:
        raise ConfigError(
            f"algorithm.advantage = {config.advantage!r} reads ref_logprobs with algorithm.kl_in = 'none', which "
            "keeps no reference policy: set kl_in to 'loss'; with kl_coef 0 the KL is measured and not added to the "
            "loss"
        )
    if config.needs_teacher and not config.teacher.teacher:
        raise ConfigError(
            f"algorithm.loss = {config.loss!r} learns from a teacher, and there is none: set "
            "algorithm.options.teacher to the directory, the run or the hub name of its model"
        )
    _check_bounds(config)
    _check_critic(config)
    _check_replay(config)
    _check_centering(config)
    declared = [estimator, *map(LOSSES.declaration, config.losses), *_check_corrections(config)]
    _check_arguments(ADVANTAGES, config.advantage)
    _check_arguments(LOSSES, *config.losses)
    _check_arguments(CORRECTIONS, *config.corrections)
    for declaration in declared:
        build_config(type(config), declaration.defaults, key="Declaration.defaults")
    read = (
        *((declaration.options, True) for declaration in declared),
        (TeacherOptions, config.needs_teacher),
        (ReferenceOptions, config.needs_reference),
        (RouterOptions, not {"router_balance", "router_replay"}.isdisjoint(config.options)),
        (CenteringOptions, "score_centering" in config.options),
        (CriticOptions, estimator.needs_values),
    )
    _check_options(config, [*dict.fromkeys(section for section, is_read in read if section is not None and is_read)])


def _check_bounds(config: AlgorithmConfig) -> None:
    """Check that losses of a sum have the same clip bounds by default, since they get the same ones."""
    for key in ("clip_low", "clip_high"):
        readers = [name for name in config.sampled_losses if key in (LOSSES.declaration(name).reads or ())]
        bounds = {name: replace(config, loss=name).explain()[key].value for name in readers}
        if getattr(config, key) is None and len({*bounds.values()}) > 1:
            raise ConfigError(
                f"algorithm.loss = {config.loss!r}: algorithm.{key} is one bound for all of them, and by default it is "
                f"{' and '.join(f'{bound:g} of {name}' for name, bound in bounds.items())}: set it"
            )


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
    if config.ratio_to == "rollout" or not any(
        LOSSES.declaration(name).scales_advantage for name in config.sampled_losses
    ):
        raise ConfigError(
            f"{what}loss = {config.loss!r} and correction = {config.correction!r}: score centering needs a loss "
            "of which the advantage is a factor (scales_advantage), and a loss whose ratio is to the generator needs "
            "no centering; choose ppo_clip, reinforce or cispo, for example"
        )
    if others := sorted(name for name in config.corrections if not CORRECTIONS.declaration(name).by_ratio):
        by_ratio = CORRECTIONS.list_where(lambda declared: declared.by_ratio)
        raise ConfigError(
            f"{what}correction = {others[0]!r}: the weight of a token that was not sampled is known for "
            f"{', '.join(by_ratio)} alone; choose one of them, or none"
        )


def _check_corrections(config: AlgorithmConfig) -> list[Declaration]:
    """Check the corrections, and return what they declare, and what "auto" may mean."""
    declared = [*map(CORRECTIONS.declaration, config.corrections)]
    named = [*zip(config.corrections, declared, strict=True)]
    weighing = sorted(name for name, correction in named if correction.weighs)
    bypassing = [name for name, correction in named if correction.ratio_to == "rollout"]
    ratios = [config.ratio_to, *(LOSSES.declaration(name).ratio_to for name in config.losses)]
    if weighing and "rollout" in ratios:
        which = f"the correction {bypassing[0]}" if bypassing else f"algorithm.loss = {config.loss!r}"
        raise ConfigError(
            f"algorithm.correction = {config.correction!r} with {which}, whose ratio is to the generator already: the "
            f"importance weights of {weighing[0]} would count twice; leave it out"
        )
    if len(weighing) > 1:
        masks = CORRECTIONS.list_where(lambda declared: not declared.weighs and declared.ratio_to == "old")[:3]
        raise ConfigError(
            f"algorithm.correction = {list(config.corrections)}: {' and '.join(weighing)} are importance weights of "
            "the same tokens, and their product would count the difference more than once: keep one of them, beside "
            f"masks{' such as ' * bool(masks)}{', '.join(masks)}"
        )
    return declared if config.correction != "auto" else [CORRECTIONS.own["truncate"]]


def _check_options(config: AlgorithmConfig, sections: Sequence[type]) -> None:
    names = [field.name for section in sections for field in fields(section)]
    for name, value in config.options.items():
        if name in names:
            continue
        hint = suggest_nearest(name, names, prefix="algorithm.options.") or f"; the options are {', '.join(names)}"
        if not sections:
            hint = (
                "; none of them declares options. To give your own function options, decorate a class with "
                '@section("algorithm.options"), and the function with @Declaration(options=CLASS)'
            )
        raise ConfigError(
            f"unknown key algorithm.options.{name} (value {value!r}) with algorithm.advantage = "
            f"{config.advantage!r}, algorithm.loss = {config.loss!r} and algorithm.correction = {config.correction!r}"
            f"{hint}"
        )
    for section in sections:
        config.read_options(section)


def _check_arguments(functions: NamedFunctions, *names: str) -> None:
    """Check that functions of the user's, and of packages that say no more of them, take two arguments."""
    for name in names:
        if functions.declaration(name).function:  # where it is, so that it is not imported here
            continue
        try:
            signature = signature_of(functions.load(name))
        except (TypeError, ValueError):  # Some functions that are not written in Python have no signature.
            continue
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"{functions.key} = {name!r}: the function is called with two positional arguments, (inputs, config), "
                f"but its signature is {signature}: {error}"
            ) from None
