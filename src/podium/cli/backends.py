"""``podium backends``: what is installed here, and what each can do."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

__all__ = ["run"]

GROUP = "podium.backends"


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="podium backends", description="List the backends installed here.")
    parser.parse_args(arguments)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        sys.stdout.write(f"{point.name:<10} {_describe(point)}\n{'':<10} {point.value}\n")
    sys.stdout.write('use one by name: podium train … --backend NAME, or podium.connect("NAME")\n')
    return 0


def _describe(point: EntryPoint) -> str:
    try:
        backend = point.load()
    except ImportError as error:  # a backend whose extra is not installed is still worth naming
        return f"not usable here: {error}"
    capabilities = dataclasses.asdict(backend.capabilities)
    can = [name for name, able in capabilities.items() if able]
    cannot = [name for name, able in capabilities.items() if not able]
    return f"can: {', '.join(can) or 'only the basics'}" + (f"; cannot: {', '.join(cannot)}" if cannot else "")
