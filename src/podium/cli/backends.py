"""``podium backends`` lists the backends that are installed, and what each can do."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from podium.exceptions import read_text
from podium.extras import explain_packages, repair_command
from podium.runtime import backends


def run_backends(arguments: Sequence[str]) -> int:
    """Print the installed backends. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="podium backends", description="List the backends installed here.")
    parser.parse_args(arguments)
    for point in sorted(backends().values(), key=lambda point: point.name):
        sys.stdout.write(f"{point.name:<10} {_describe(point)}\n{'':<10} {point.value}\n")
    sys.stdout.write('use one by name: podium train … --backend NAME, or podium.connect("NAME")\n')
    sys.stdout.write(f"{explain_packages('podium.backends')}\n")
    return 0


def _describe(point: EntryPoint) -> str:
    try:
        backend: Any = point.load()
        if (other := backend.stand_in()) is not None:
            return f"not usable here: {other[1]}; {other[0]} takes its place"
        if hasattr(backend, "capabilities"):
            capabilities = dataclasses.asdict(backend.capabilities)
        else:  # only an instance knows
            with contextlib.closing(backend()) as made:
                capabilities = dataclasses.asdict(made.capabilities)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one that does not work here is still worth naming
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        remedy = repair_command(point, error)
        return f"not usable here: {kind}{read_text(error)}" + (f": {remedy}" if remedy else "")
    can = [name for name, able in capabilities.items() if able]
    cannot = [name for name, able in capabilities.items() if not able]
    return f"can: {', '.join(can) or 'only the basics'}" + (f"; cannot: {', '.join(cannot)}" if cannot else "")
