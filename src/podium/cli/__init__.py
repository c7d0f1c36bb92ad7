"""The command line: parse, choose recipe and backend, call the trainer.

Everything heavy is imported by the command that needs it, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from podium.errors import PodiumError

__all__ = ["main"]

COMMANDS = {
    "train": ("train", "train a model: podium train grpo|ppo|sft"),
    "eval": ("inference", "score a run's model, or any other, on held-out prompts"),
    "sample": ("inference", "ask a run's model, or any other, something"),
    "backends": ("backends", "list the backends installed here, and what each can do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for a mistake of the user's, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command not in COMMANDS:
        return _no_command(command)
    try:
        module = import_module(f"podium.cli.{COMMANDS[command][0]}")
        status: int = getattr(module, f"run_{command}")(rest)
        return status
    except PodiumError as error:
        if debug:
            traceback.print_exc()
        else:
            sys.stderr.write(f"podium {command}: {error}\n")
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write(f"podium {command}: interrupted\n")
        return 130


def _no_command(word: str) -> int:
    parser = argparse.ArgumentParser(
        prog="podium",
        usage="podium COMMAND [options]",
        description="Reinforcement-learning post-training of language models, driven by one script.",
        epilog="podium COMMAND --help says more. --debug anywhere shows the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"podium {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    parser.parse_args([word])  # prints help or the version and exits, or says what the commands are and exits with 2
    return 2


def _version() -> str:
    try:
        return version("podium")
    except PackageNotFoundError:
        return "(not installed)"
