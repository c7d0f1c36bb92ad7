"""``podium train RECIPE`` reads a configuration, chooses a backend and calls the trainer."""

import argparse
import json
import os
import shlex
import sys
import textwrap
import typing
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.algorithms import ADVANTAGES, LOSSES
from podium.cli.connecting import Backend, parse_with_backend
from podium.cli.presets import Preset, list_presets, read_preset
from podium.config import find_override, keys_of, load_config, parse_overrides, read_values
from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import find_installed, load_installed, nearest
from podium.key_types import arms_of, locate_key
from podium.lazy import without_collector
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.paths import resolve_resume
from podium.runs.recipes import find_recipe, list_recipes, recipe_of
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import CONFIG, check_run
from podium.runtime.connecting import backend_class
from podium.telemetry import Note, Waiting, emit, flush
from podium.trainer.preload import PRELOAD

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer

BACKEND = "local"
_DRY_RUN, _DRY_RUNS = "--dry-run", "podium.dry_run"


def run_train(arguments: Sequence[str]) -> int:
    """Train, or print the plan or the keys. Returns the exit status."""
    options, overrides, backend = parse_with_backend(_parser(), arguments, default=BACKEND)
    if options.keys:
        _print_keys(find_recipe(options.recipe).config)
        return 0
    typed = overrides
    if options.replay is not None:
        _check_replay(options)
        options.config = str(Path(options.replay) / CONFIG)
        overrides = _replay_overrides(options.replay, overrides)
    preset = read_preset(options.preset) if options.preset else None
    if preset is not None:
        _check_preset(preset, options)
        values = read_values(find_recipe(options.recipe).config, options.config) if options.config else {}
        overrides = preset.overrides(values, overrides)
    config = _config(options.recipe, options.config, options.resume, overrides)
    if options.measure and not options.dry_run:
        raise ConfigError("--measure trains nothing: write --dry-run --measure, or leave it out to train")
    if options.dry_run:
        show_dry_run = load_installed(_find_dry_run(), _DRY_RUN)
        sys.stdout.write(f"{preset.describe()}\n\n" if preset is not None else "")
        make_trainer = partial(_make_trainer, config, options.recipe, backend)
        show_dry_run(config, backend.name, backend.options, make_trainer, measure=options.measure)
        return 0
    trainer = _open_view(config, options.recipe, backend, describe_repeats(type(config), typed))
    summary = trainer.fit()
    if not summary.finished:
        backend_arguments = [] if backend.name == BACKEND else ["--backend", backend.name]
        again = [
            "podium",
            "train",
            options.recipe,
            "--resume",
            str(trainer.run.directory.path),
            *backend_arguments,
            *backend.words,
        ]
        sys.stdout.write(f"stopped after step {summary.steps}; to continue: {shlex.join(again)}\n")
    return 0


def _find_dry_run() -> EntryPoint:
    """Return the entry point of the function that prints what a run would do.

    Raises:
        ConfigError: No installed package has it, or several have.
    """
    entry = find_installed(_DRY_RUNS, "show", _DRY_RUN)
    if entry is None:
        raise ConfigError(f"{_DRY_RUN} needs a package that describes runs: {explain_packages(_DRY_RUNS, 'show')}")
    return entry


def _check_replay(options: argparse.Namespace) -> None:
    """Refuse what a replay cannot be combined with. Raises ConfigError."""
    for name in ("config", "resume", "preset"):
        if getattr(options, name) is not None:
            flag = "recipe" if name == "preset" else name
            raise ConfigError(
                f"--replay begins with the settings of its run: give --SECTION.KEY VALUE in place of --{flag}"
            )
    check_run(Path(options.replay))
    values = read_values(
        find_recipe(options.recipe).config, options.replay, content=RunFiles(options.replay).read_small(CONFIG)
    )
    if (right := recipe_of(values, options.recipe)) != options.recipe:
        remedy = f": podium train {right} --replay {options.replay}" if right in ("grpo", "ppo") else ""
        why = "is a run of another recipe" if remedy else "has no sampled completions to train on again"
        raise ConfigError(f"{options.replay} {why}{remedy}")


def _replay_overrides(run: str, overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` and those that make the settings of ``run`` those of a replay of it."""
    options = json.dumps({"run": run})
    new = ["--run.name", "", "--run.resume", "", "--run.epochs", "null"]
    new += ["--eval.items", "0", "--eval.stop_at", "null", "--eval.patience", "0"]
    return [*new, "--engine.options", options, *overrides, "--engine.name", "replay"]


def _check_preset(preset: Preset, options: argparse.Namespace) -> None:
    if options.recipe != "grpo":
        raise ConfigError(
            f"--recipe {preset.name} has settings of podium train grpo, not of podium train {options.recipe}"
        )
    if options.resume not in (None, "auto"):  # auto gives all settings in any case
        raise ConfigError(
            "--resume uses the run's own settings: leave out --recipe; change a key by --SECTION.KEY VALUE"
        )


def describe_repeats(cls: type, words: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key of ``cls`` that takes a list and that the ``words`` of a command give several
    values, each of which replaces the one before it."""
    values: dict[str, list[Any]] = {}
    for key, value in parse_overrides(cls, words):
        values.setdefault(key, []).append(value)
    for key, (*earlier, last) in values.items():
        arms = arms_of(locate_key(cls, key.split("."))[1].annotation)
        if any(value != last for value in earlier) and any(typing.get_origin(arm) is tuple for arm in arms):
            yield (
                f"--{key} is given {len(earlier) + 1} times, and the last one alone counts; several values are one "
                f"list: --{key} '[A, B]'"
            )


def _open_view(
    config: PPOConfig | SFTConfig, recipe: str, backend: Backend, notes: Iterable[str]
) -> "Trainer[Any, Any, Any]":
    """Say at once what will run, with ``notes``, and make the trainer, whose imports take seconds.

    The backend's processes begin their imports before this process does, so that both import at the same time.
    """
    backend_class(backend.name, backend.options).prepare(PRELOAD)
    from podium.telemetry.sinks.console import ConsoleSink  # imports rich, for which those processes need not wait

    with ConsoleSink():
        for sentence in (_headline(config, recipe), *notes):
            emit(Note(sentence))
        emit(Waiting("importing torch and transformers"))
        flush()
        with without_collector():
            return _make_trainer(config, recipe, backend)


def _headline(config: PPOConfig | SFTConfig, recipe: str) -> str:
    model = config.model
    name = model.path or f"new {model.config.get('model_type', '')} with random weights"
    run = config.run.resume or (os.path.join(config.run.dir, config.run.name) if config.run.name else "")
    run = run or f"new in {config.run.dir}"
    environment = "" if isinstance(config, SFTConfig) else config.environment.name
    return f"podium {recipe}  run {run}  model {name}  data {config.data.shown_train or environment}"


def _make_trainer(config: PPOConfig | SFTConfig, recipe: str, backend: Backend) -> "Trainer[Any, Any, Any]":
    return find_recipe(recipe).load_trainer()(config, cluster=backend.name, backend_options=backend.options)


def _parser() -> argparse.ArgumentParser:
    recipes = list_recipes()
    parser = argparse.ArgumentParser(
        prog="podium train",
        usage=f"podium train {{{','.join(recipes)}}} [--config FILE] [--SECTION.KEY VALUE ...] [options]",
        description="Train a model. --SECTION.KEY sets any key of the configuration and overrides the file.",
        epilog=textwrap.dedent(
            """\
            examples:
              podium train grpo --model.path Qwen/Qwen3-0.6B --data.train train.jsonl --reward.name gsm8k
              podium train grpo --recipe dapo --config run.yaml
              podium train sft --config run.yaml --optim.lr 1e-5 --dry-run
              podium train grpo --resume runs/NAME
              podium train grpo --replay runs/NAME --algorithm.loss gspo
              podium train grpo --config run.yaml --backend local --backend.log_dir logs
            """
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe",
        type=_recipe,
        metavar="|".join(recipes),
        help="grpo: GRPO; ppo: PPO with a critic; sft: supervised fine-tuning; others are of installed packages",
    )
    parser.add_argument(
        "--recipe",
        dest="preset",
        metavar="NAME",
        help=f"start from the settings of a paper, with grpo: {', '.join(list_presets())}",
    )
    parser.add_argument("--config", metavar="FILE", help="read settings from this YAML file")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume the run in this directory with its own settings; auto resumes the run of run.name if it exists",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        help="train again on the completions that the run in this directory has recorded; other settings are those of "
        "the run, unless you give them; nothing is sampled",
    )
    parser.add_argument(_DRY_RUN, action="store_true", help="print settings, plan and the first data; start nothing")
    parser.add_argument("--measure", action="store_true", help="with --dry-run: start the workers and time a step")
    parser.add_argument("--keys", action="store_true", help="list every setting with its default")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _recipe(word: str) -> str:
    """Return the word if it names a recipe, and otherwise say what it is, which recipe is near, or which there are."""
    name = word.lower()
    recipes = list_recipes()
    if word in recipes:
        return word
    if name in list_presets() and name not in recipes:
        raise ArgumentTypeError(f"{name} is a preset of the recipe grpo: podium train grpo --recipe {name}")
    for key, names in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        if name in names and name not in recipes:
            raise ArgumentTypeError(
                f"{name} is a setting of the recipe grpo: podium train grpo --algorithm.{key} {name}"
            )
    for recipe in recipes:
        if words := find_recipe(recipe).words.get(name):
            raise ArgumentTypeError(f"{name} is a setting of the recipe {recipe}: podium train {recipe} {words}")
    meanings = ", ".join(f"{recipe} {find_recipe(recipe).help}" for recipe in recipes)
    raise ArgumentTypeError(
        f"there is no recipe {word!r}{nearest(name, recipes, 'podium.recipes')}; {meanings}; "
        f"{explain_packages('podium.recipes', name)}"
    )


def _config(recipe: str, path: str | None, resume: str | None, overrides: Sequence[str]) -> PPOConfig | SFTConfig:
    cls, content = find_recipe(recipe).config, None
    if resume is None and path is None:  # --run.resume without a file means the same
        resume = find_override(cls, overrides, "run.resume") or None
    if resume == "auto":  # the trainer looks for the run
        return load_config(cls, path, [*overrides, "--run.resume", resume])
    if resume is not None:
        if path is not None:
            raise ConfigError(
                "--resume uses the run's own settings: leave out --config; change a key by --SECTION.KEY VALUE"
            )
        check_run(Path(resume))
        path = str(Path(resume) / CONFIG)
        content = RunFiles(resume).read_small(CONFIG)
        right = recipe_of(read_values(cls, path, content=content), recipe)
        if recipe != right:
            raise ConfigError(f"{resume} is a run of another recipe: podium train {right} --resume {resume}")
        overrides = [*overrides, "--run.resume", resume]
    return resolve_resume(load_config(cls, path, overrides, content))


def _print_keys(cls: type) -> None:
    for (section, title), keys in groupby(keys_of(cls), lambda key: (key.path.rpartition(".")[0], key.section)):
        sys.stdout.write(textwrap.fill(f"{section}: {title}", 100, subsequent_indent="  ") + "\n\n")
        for key in keys:
            default = key.default if key.default and isinstance(key.default, str) else json.dumps(key.default)
            text = textwrap.indent(textwrap.fill(key.doc, 94), " " * 6)
            sys.stdout.write(f"  --{key.path} {default}  ({key.expects})\n{text}\n")
        sys.stdout.write("\n")
