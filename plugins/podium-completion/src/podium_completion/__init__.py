"""``podium completion bash|zsh|fish`` prints a script by which the shell completes commands, keys and values.

The script contains all words, so completion starts no Python. The words come from the help of the commands and from the
keys of the configuration. Libraries for completion read the arguments of argparse, and keys are not among them.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from podium.config import Key, keys_of
from podium.runs.config import InferenceConfig
from podium.runs.recipes import find_recipe, list_recipes
from podium.runtime import backends

__all__ = ["run_completion"]

WITH_KEYS = ("eval", "sample")


class _Words(NamedTuple):
    """What can be completed.

    Attributes:
        commands: The help of each command.
        options: Options by command, or by "train RECIPE", each with its help, which may be empty.
        values: The values of an option that takes only certain values.
    """

    commands: Mapping[str, str]
    options: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Sequence[str]]


def run_completion(arguments: Sequence[str]) -> int:
    """Print the script for a shell. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium completion",
        description="Print a script by which a shell completes commands, keys and values.",
        epilog="bash: podium completion bash > ~/.local/share/bash-completion/completions/podium\n"
        "zsh:  podium completion zsh > ~/.zfunc/_podium   (with ~/.zfunc in fpath, before compinit)\n"
        "fish: podium completion fish > ~/.config/fish/completions/podium.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish")
    shell = parser.parse_args(arguments).shell
    words = _words()
    sys.stdout.write(_fish(words) if shell == "fish" else _bash(words) if shell == "bash" else _zsh(words))
    return 0


def _words() -> _Words:
    from podium.cli import describe_commands

    commands = describe_commands()
    names = sorted(commands, key=lambda name: " " not in name)  # in bash, the first pattern that fits wins
    options = {name: dict.fromkeys(_options_of(name), "") for name in names if name != "completion"}
    commands = {name: text for name, text in commands.items() if " " not in name}
    train_options = options.pop("train")
    keys = {recipe: keys_of(find_recipe(recipe).config) for recipe in list_recipes()}
    options |= {f"train {recipe}": {**train_options, **_helps(keys[recipe])} for recipe in keys}
    for name in options.keys() & WITH_KEYS:
        options[name] |= _helps(keys_of(InferenceConfig))
    values: dict[str, Sequence[str]] = {"--backend": sorted(backends())}
    values |= {f"--{key.path}": choices for many in keys.values() for key in many if (choices := _values(key))}
    return _Words(commands, options, values)


def _options_of(command: str) -> list[str]:
    """The options in the help of a command; none of a package's command that cannot be loaded."""
    from podium.cli import COMMANDS, load_command

    output = io.StringIO()
    broken = () if command in COMMANDS else (Exception,)
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit, *broken):
        load_command(command)(["--help"])
    text = output.getvalue().partition("\n\n")[2]  # without the line of usage
    return list(dict.fromkeys(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]*)", text, re.MULTILINE)))


def _helps(keys: Sequence[Key]) -> dict[str, str]:
    return {f"--{key.path}": key.doc.partition(". ")[0].rstrip(".") for key in keys}


def _values(key: Key) -> list[str]:
    """The values of a key that takes only some words."""
    if key.expects == "true or false":
        return ["true", "false"]
    match = re.fullmatch(r"one of ([\w-]+(?:, [\w-]+)*)(?: or null)?", key.expects)
    return match[1].split(", ") if match else []


_BASH = """\
# Completion of podium. Made by: podium completion bash
_podium() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" found=""
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
    if [[ -z $found && $COMP_CWORD -eq 1 ]]; then
        found="{commands}"
    elif [[ -z $found && $COMP_CWORD -eq 2 && ${{COMP_WORDS[1]}} == train ]]; then
        found="{recipes}"
    elif [[ -z $found && $current == -* ]]; then
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{options}
        esac
    fi
    [[ -z $found ]] || COMPREPLY=($(compgen -W "$found" -- "$current"))
}}
complete -o default -F _podium podium
"""

_ZSH = """\
#compdef podium
# Completion of podium. Made by: podium completion zsh
_podium() {{
    local current="${{words[CURRENT]}}" found=""
    case "${{words[CURRENT-1]}}" in
{values}
    esac
    if [[ -z $found && $CURRENT -eq 2 ]]; then
        found="{commands}"
    elif [[ -z $found && $CURRENT -eq 3 && ${{words[2]}} == train ]]; then
        found="{recipes}"
    elif [[ -z $found && $current == -* ]]; then
        case "${{words[2]}} ${{words[3]}}" in
{options}
        esac
    fi
    if [[ -n $found ]]; then compadd -- ${{=found}}; else _files; fi
}}
if [[ $funcstack[1] == _podium ]]; then _podium "$@"; else compdef _podium podium; fi
"""


def _bash(words: _Words) -> str:
    return _fill_template(_BASH, words)


def _zsh(words: _Words) -> str:
    return _fill_template(_ZSH, words)


def _fill_template(script: str, words: _Words) -> str:
    options = {
        f'"{name}"' if " " in name else f'"{name} "*': " ".join(choices) for name, choices in words.options.items()
    }
    return script.format(
        values=_cases({name: " ".join(choices) for name, choices in words.values.items()}, 8),
        commands=" ".join(words.commands),
        recipes=" ".join(list_recipes()),
        options=_cases(options, 12),
    )


def _cases(found: Mapping[str, str], indent: int) -> str:
    return "\n".join(f'{" " * indent}{pattern}) found="{text}" ;;' for pattern, text in found.items())


def _fish(words: _Words) -> str:
    """One line for each word, with its help."""
    lines = ["# Completion of podium. Made by: podium completion fish"]
    lines += [
        f"complete -c podium -n __fish_use_subcommand -f -a {name} -d {_quote(text)}"
        for name, text in words.commands.items()
    ]
    recipes = " ".join(list_recipes())
    lines.append(
        "complete -c podium -n '__fish_seen_subcommand_from train; and not __fish_seen_subcommand_from "
        f"{recipes}' -f -a '{recipes}'"
    )
    for name, options in words.options.items():
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option, text in options.items():
            values = f" -x -a '{' '.join(words.values[option])}'" if option in words.values else ""
            shown = f" -d {_quote(text)}" if text else ""
            lines.append(f"complete -c podium -n '{condition}' -l {option[2:]}{values}{shown}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
