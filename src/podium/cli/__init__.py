"""The command line parses arguments and calls the trainer.

Each command imports what it needs when it runs, so that help and mistakes are answered at once.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint

import podium
from podium.cli.interruption import end_interrupted, ended_by_sigterm
from podium.errors import PodiumError
from podium.exceptions import describe_error
from podium.extras import explain_packages
from podium.functions import nearest
from podium.installed import list_entry_points
from podium.lazy import without_collector
from podium.spelling import explain_not_text, is_text
from podium.telemetry.formatting import visible

__all__ = ["COMMANDS", "describe_commands", "find_commands", "load_command", "main"]

COMMANDS = {
    "train": ("train", "train a model: podium train grpo|ppo|sft, or a recipe of a package"),
    "backends": ("backends", "list the installed backends, and what each can do"),
}


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _escape_warnings() -> None:
    """Spell out the control characters of warnings, which repeat what stands in files."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 2 for an error of Podium's, 130 or 143 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    _escape_warnings()
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    installed = {} if command in COMMANDS else find_commands()
    if command not in COMMANDS and command not in installed:
        return _show_help(command, installed)
    try:
        _check_text(rest)
        with ended_by_sigterm():
            with without_collector():
                run = load_command(command)
            status: int = run(rest)
            sys.stdout.flush()  # here an error has words; at the interpreter's end it would have none
            return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PodiumError, OSError) as error:
        if debug:
            traceback.print_exc()
        else:
            sys.stderr.write(f"podium {command}: {visible(_summarize_error(error))}\n")
        return 2
    except Exception as error:
        from podium.processes import explain_limit

        if debug or not (sentence := explain_limit(error)):
            raise
        sys.stderr.write(f"podium {command}: {sentence} ({describe_error(error)})\n")
        return 2
    except KeyboardInterrupt as interruption:
        return end_interrupted(command, interruption)


def _check_text(words: Sequence[str]) -> None:
    for word in words:
        if not is_text(word):
            reason = explain_not_text(word, "rename the file, if it names one")
            raise PodiumError(f"there is an argument {word[:200]!r}, {reason}")


def find_commands() -> Mapping[str, EntryPoint]:
    """The commands of installed packages by name: entry points of the group ``podium.commands``, each a function that
    takes the words behind the command and returns the exit status. Podium's own commands win over others."""
    return {entry.name: entry for entry in list_entry_points(group="podium.commands") if entry.name not in COMMANDS}


def describe_commands() -> dict[str, str]:
    """The help of each command. That of a package's is the summary in the metadata of the package."""
    texts = {name: text for name, (_, text) in COMMANDS.items()}
    for name, entry in find_commands().items():
        summary: str = (entry.dist.metadata["Summary"] or "").rstrip(".") if entry.dist else ""
        package = entry.dist.name if entry.dist else entry.module
        texts[name] = f"{summary[0].lower()}{summary[1:]} ({package})" if summary else f"of the package {package}"
    return texts


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command of Podium's or of an installed package."""
    if name not in COMMANDS:
        return find_commands()[name].load()
    return getattr(import_module(f"podium.cli.{COMMANDS[name][0]}"), f"run_{name}")


def _summarize_error(error: PodiumError | OSError) -> str:
    """Return the message of an error. For an error of Podium's that a worker raised, this is the message without the
    worker's traceback."""
    if isinstance(error, OSError) and not isinstance(error, PodiumError):
        if error.filename is None and not isinstance(error, FileNotFoundError) and not _try_stdout():
            return f"stdout cannot be written ({error.strerror or error})"
        from podium.models.manifest import refusal_of
        from podium.processes import explain_limit

        if sentence := explain_limit(error):
            return f"{sentence} ({error})"

        if reason := refusal_of(error):
            return f"cannot write {error.filename or 'a file'}: {reason}"
        if isinstance(error, FileNotFoundError) and not _has_directory():
            return "the directory in which it was started does not exist any more: cd to one that does"
        prefix = f"{error.filename}: " if error.filename else ""
        return f"{prefix}{error.strerror or error}; check the path, its permissions and the room on the disk"
    cause = error.__cause__
    if cause is None:
        return str(error)
    from podium.processes import explain_limit

    text, sentence = str(error), explain_limit(cause)
    if getattr(error, "remote_traceback", "") and (sentence or isinstance(cause, PodiumError)):
        name = str(cause) if isinstance(cause, PodiumError) else describe_error(cause)
        text = f"{name} (raised in a worker; --debug shows where)"
    return f"{sentence} ({text})" if sentence else text


def _try_stdout() -> bool:
    """Write a line end to stdout and return whether that works. Otherwise stdout becomes /dev/null."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _has_directory() -> bool:
    """Whether the current directory exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _show_help(word: str, installed: Mapping[str, EntryPoint]) -> int:
    parser = argparse.ArgumentParser(
        prog="podium",
        usage="podium COMMAND [options]",
        description="Reinforcement-learning post-training of language models, driven by one script.",
        epilog="podium COMMAND --help says more. --debug anywhere shows the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"podium {podium.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [...]")
    texts = describe_commands()
    for text in dict.fromkeys(texts.values()):  # commands of one package have one text
        same = ", ".join(name for name in texts if texts[name] == text)
        commands.add_parser(same, help=text.replace("%", "%%"))
    if not word.startswith("-"):
        from podium.runs.recipes import list_recipes

        names = [*COMMANDS, *installed]
        if word in list_recipes():
            parser.error(f"{word!r} is a recipe: write podium train {word}")
        parser.error(
            f"there is no command {word!r}{nearest(word.lower(), names, 'podium.commands')}; the commands are "
            f"{', '.join(names)}; {explain_packages('podium.commands', word)}"
        )
    parser.parse_args([word])  # prints help or the version and exits, or refuses the option and exits with 2
    return 2
