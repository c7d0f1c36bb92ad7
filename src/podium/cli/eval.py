"""``podium eval MODEL``: held-out accuracy of a run's final model, a model's directory or a hub name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from podium.cli.connecting import add_backend, split_backend
from podium.cli.models import inference_config, inference_parser

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print; returns the exit status."""
    parser = inference_parser("podium eval", "Score a model on held-out prompts.")
    add_backend(parser, "local")
    options, overrides = parser.parse_known_args(arguments)
    backend = split_backend(overrides)
    config = inference_config(options.model, options.config, backend.other)

    import podium
    from podium.telemetry.formatting import percent
    from podium.trainer import PRELOAD, Accuracy, evaluate_model

    with podium.connect(options.backend, hints={"preload": PRELOAD}, **backend.options) as cluster:
        found = evaluate_model(config, cluster)
    accuracy = Accuracy(found.correct, found.items)
    low, high = accuracy.interval()
    sys.stdout.write(
        f"accuracy  {percent(accuracy.share)}  ({found.correct} of {found.items}; 95% interval {percent(low)} to "
        f"{percent(high)})\nreward    {found.reward_mean:.4f}\n"
    )
    for sample in found.samples:
        sys.stdout.write(f"\nprompt    {sample.prompt!r}\nanswer    {sample.completion!r}\n")
        sys.stdout.write(f"expected  {sample.expected!r}  reward {sample.reward:g}\n")
    return 0
