"""``podium train grpo|ppo|sft``: a configuration, a backend, and the trainer does the rest."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.trainer import PPOConfig, SFTConfig

__all__ = ["run"]

RECIPES = ("grpo", "ppo", "sft")


def run(arguments: Sequence[str]) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    if options.keys:
        return _print_keys(options.recipe)
    config = _config(options.recipe, options.config, options.resume, overrides)
    from podium.trainer import PPOConfig, PPOTrainer, SFTTrainer, describe_plan

    if options.dry_run:
        sys.stdout.write(describe_plan(config, options.backend) + "\n")
        return 0
    import podium

    with podium.connect(options.backend, **_backend_options(options.backend)) as cluster:
        if isinstance(config, PPOConfig):
            PPOTrainer(config, cluster=cluster).fit()
        else:
            SFTTrainer(config, cluster=cluster).fit()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podium train",
        usage="podium train {grpo,ppo,sft} [--config FILE] [--SECTION.KEY VALUE ...] [options]",
        description="Train a model. Every setting of the configuration can be given here too, and then wins:",
        epilog=textwrap.dedent(
            """\
              podium train grpo --model.path Qwen/Qwen3-0.6B --data.train train.jsonl --reward.name gsm8k
              podium train sft --config run.yaml --optim.lr 1e-5 --dry-run
              podium train grpo --resume runs/NAME
            """
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=RECIPES, help="GRPO, PPO with a critic, or supervised fine-tuning")
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the settings")
    parser.add_argument("--backend", default="local", metavar="NAME", help="local (default), inline, or another")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this directory, with its settings")
    parser.add_argument("--dry-run", action="store_true", help="print settings and plan; start nothing")
    parser.add_argument("--keys", action="store_true", help="list every setting with its default")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _config(recipe: str, path: str | None, resume: str | None, overrides: Sequence[str]) -> PPOConfig | SFTConfig:
    from podium.trainer import config_class, load_config, run_config_path

    if resume is not None:
        if path is not None:
            raise ConfigError(
                "--resume goes on with the run's own settings: leave out --config, or give single settings"
            )
        path = str(run_config_path(resume))
        overrides = [*overrides, "--run.resume", resume]
    return load_config(config_class(recipe), path, overrides)


def _print_keys(recipe: str) -> int:
    from podium.trainer import config_class, keys_of

    for key in keys_of(config_class(recipe)):
        default = (
            "null" if key.default is None else str(key.default).lower() if key.default in (True, False) else key.default
        )
        sys.stdout.write(f"--{key.path} {default!s}\n")
        sys.stdout.write(
            textwrap.fill(f"{key.doc} ({key.expects})", 100, initial_indent="      ", subsequent_indent="      ") + "\n"
        )
    return 0
