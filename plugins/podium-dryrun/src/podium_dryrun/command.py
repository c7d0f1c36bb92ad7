"""The dry run of ``podium train``: its parts, in the order in which a reader has the answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from podium.runs.config import PPOConfig, SFTConfig
from podium_dryrun.plan import describe_plan

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer

__all__ = ["show_dry_run"]


def show_dry_run(
    config: PPOConfig | SFTConfig,
    backend: str,
    options: Mapping[str, Any],
    make_trainer: Callable[[], Trainer[Any, Any, Any]],
    *,
    measure: bool = False,
) -> None:
    """Print the plan, the data and the memory of a run, and with ``measure`` the times of its steps.

    ``backend`` and ``options`` are those of :func:`podium.connect`; ``make_trainer`` makes the trainer of the run,
    whose imports take seconds.

    Raises:
        ConfigError, DataError, RewardError: The run would be refused.
    """
    sys.stdout.write(describe_plan(config, backend, options) + "\n\n")
    sys.stdout.flush()
    # They import torch, which the checks of the configuration do not need.
    from podium_dryrun.data import count_tokens, describe_data
    from podium_dryrun.memory import describe_memory

    trainer = make_trainer()
    read_data = cache(trainer.read_data)
    sys.stdout.write(describe_data(read_data, trainer.check_grader) + "\n\n")
    sys.stdout.write(describe_memory(config, backend, options, count_tokens(read_data())) + "\n")
    if measure:
        from podium.cli.spinner import StatusSink
        from podium_dryrun.times import describe_times

        sys.stdout.flush()
        with StatusSink("starting the workers to measure a step"):
            times = describe_times(trainer, read_data())
        sys.stdout.write(f"\n{times}\n")
