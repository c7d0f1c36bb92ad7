"""``podium train grpo|ppo|sft``: a configuration, a backend, and the trainer does the rest."""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.cli.connecting import add_backend, split_backend
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.trainer import PPOConfig, SFTConfig

__all__ = ["print_keys", "run"]

BACKEND = "local"
RECIPES = ("grpo", "ppo", "sft")


def run(arguments: Sequence[str]) -> int:
    """Train, or print the plan or the settings; returns the exit status."""
    options, overrides = _parser().parse_known_args(arguments)
    if options.keys:
        from podium.trainer import config_class

        return print_keys(config_class(options.recipe))
    backend = split_backend(overrides)
    config = _config(options.recipe, options.config, options.resume, backend.other)
    from podium.trainer import PPOConfig, PPOTrainer, SFTTrainer, describe_plan

    if options.dry_run:
        from podium.runtime import backend_class

        backend_class(options.backend, backend.options)
        sys.stdout.write(describe_plan(config, options.backend) + "\n")
        return 0
    if isinstance(config, PPOConfig):
        trainer = PPOTrainer(config, cluster=options.backend, backend_options=backend.options)
    else:
        trainer = SFTTrainer(config, cluster=options.backend, backend_options=backend.options)
    summary = trainer.fit()
    if not summary.finished:
        run = trainer.session.directory.path
        there = [] if options.backend == BACKEND else ["--backend", options.backend]
        again = ["podium", "train", options.recipe, "--resume", str(run), *there, *backend.words]
        sys.stdout.write(f"stopped after step {summary.steps}; {shlex.join(again)} goes on\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podium train",
        usage="podium train {grpo,ppo,sft} [--config FILE] [--SECTION.KEY VALUE ...] [options]",
        description="Train a model. Any setting of the configuration can be given as --SECTION.KEY, and then wins.",
        epilog=textwrap.dedent(
            """\
            examples:
              podium train grpo --model.path Qwen/Qwen3-0.6B --data.train train.jsonl --reward.name gsm8k
              podium train sft --config run.yaml --optim.lr 1e-5 --dry-run
              podium train grpo --resume runs/NAME
              podium train grpo --config run.yaml --backend ray --backend.address auto
            """
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=RECIPES, help="GRPO, PPO with a critic, or supervised fine-tuning")
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the settings")
    add_backend(parser, BACKEND)
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this directory, with its settings")
    parser.add_argument("--dry-run", action="store_true", help="print settings and plan; start nothing")
    parser.add_argument("--keys", action="store_true", help="list every setting with its default")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _config(recipe: str, path: str | None, resume: str | None, overrides: Sequence[str]) -> PPOConfig | SFTConfig:
    from podium.trainer import config_class, load_config, read_values, run_config_path
    from podium.trainer.loading import parse_overrides

    cls = config_class(recipe)
    if resume is None and path is None:  # --run.resume without a file means the same
        resume = dict(parse_overrides(cls, overrides)).get("run.resume") or None
    if resume is not None:
        if path is not None:
            raise ConfigError("--resume goes on with the run's own settings: leave out --config; give single settings")
        path = str(run_config_path(resume))
        supervised = "examples" in read_values(cls, path).get("batch", {})
        if supervised != (recipe == "sft"):
            right = "sft" if supervised else "grpo"
            raise ConfigError(f"{resume} is a run of another recipe: podium train {right} --resume {resume}")
        overrides = [*overrides, "--run.resume", resume]
    return load_config(cls, path, overrides)


def print_keys(cls: type) -> int:
    """Every setting of a configuration class, with its default and what it takes."""
    from podium.trainer import keys_of

    for key in keys_of(cls):
        sys.stdout.write(f"--{key.path} {_shown(key.default)}\n")
        doc = key.doc.replace("``", "").rstrip(".")
        sys.stdout.write(textwrap.indent(textwrap.fill(f"{doc} ({key.expects})", 100), "      ") + "\n")
    return 0


def _shown(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return str(list(default))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return '""' if default == "" else str(default)
