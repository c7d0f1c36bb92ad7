"""``podium sample MODEL``: ask a model something, once or in a conversation of single questions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from podium.cli.connecting import add_backend, split_backend
from podium.cli.models import inference_config, inference_parser

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Sample and print; returns the exit status."""
    parser = inference_parser("podium sample", "Write prompts, read completions. Each prompt stands alone.")
    parser.add_argument("--prompt", metavar="TEXT", help="one prompt, then end; without it prompts are read from stdin")
    add_backend(parser, "inline")
    options, overrides = parser.parse_known_args(arguments)
    backend = split_backend(overrides)
    config = inference_config(options.model, options.config, backend.other)

    import podium
    from podium.trainer import PRELOAD, open_sampler

    prompts = [options.prompt] if options.prompt is not None else _typed()
    with (
        podium.connect(options.backend, hints={"preload": PRELOAD}, **backend.options) as cluster,
        open_sampler(config, cluster) as sample,
    ):
        for number, prompt in enumerate(prompts):
            for completion in sample(prompt, number):
                sys.stdout.write(completion + "\n")
            sys.stdout.flush()
    return 0


def _typed() -> Iterator[str]:
    """Lines from stdin until it ends; a question mark asks for them where a person types."""
    person = sys.stdin.isatty()
    while True:
        if person:
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
