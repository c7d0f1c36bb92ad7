"""``podium config --from verl run.sh`` writes a configuration of Podium that means the same, and so for TRL."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from podium.errors import ConfigError
from podium.spelling import write_count
from podium_migration.conversion import Conversion
from podium_migration.sources import read_trl, read_verl
from podium_migration.trl import convert_trl
from podium_migration.verl import convert_verl

__all__ = ["run_config"]

_PROJECTS: Final[dict[str, Callable[[Path, Sequence[str]], Conversion]]] = {
    "verl": lambda path, overrides: convert_verl(read_verl(path, overrides)),
    "trl": lambda path, overrides: convert_trl(read_trl(path, overrides)),
}


def run_config(arguments: Sequence[str]) -> int:
    """Write a configuration of Podium from a file of another project. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium config",
        description="Write a configuration of Podium that means what a file of another project means. Nothing of the "
        "file is run. Comments say what has no counterpart, and what is yours to decide.",
        epilog="podium config --from verl run_grpo.sh\n"
        "podium config --from verl run_grpo.sh trainer.n_gpus_per_node=1\n"
        "podium config --from trl train.py --output run.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--from", dest="project", choices=sorted(_PROJECTS), required=True, help="the project of the file"
    )
    parser.add_argument("file", type=Path, help="a shell script, YAML, or for TRL a Python script")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="further settings of the project, which win")
    parser.add_argument(
        "--output", default="run.yaml", metavar="FILE", help="run.yaml by default; - prints the configuration"
    )
    options = parser.parse_intermixed_args(arguments)
    conversion = _PROJECTS[options.project](options.file, options.settings)
    source = shlex.join([str(options.file), *options.settings])
    command = f"podium train {conversion.recipe} --config {'run.yaml' if options.output == '-' else options.output}"
    text = conversion.write(f"Made from {source} of {conversion.table.project}.", f"To train: {command}")
    if options.output == "-":
        sys.stdout.write(text)
        return 0
    try:
        with open(options.output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{options.output} exists: name another file by --output, or remove it") from None
    sys.stdout.write(
        f"{options.output}: {write_count(len(conversion.values), 'setting')} for podium train {conversion.recipe}\n"
    )
    sys.stdout.writelines(f"  {line}\n" for line in conversion.list_lost(most=4))
    sys.stdout.write(f"to check it: {command} --dry-run\n")
    return 0
