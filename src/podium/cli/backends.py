"""``podium backends``: what is installed here, and what each can do."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint

from podium.runtime import Backend, Capabilities, backends

__all__ = ["run_backends"]


def run_backends(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="podium backends", description="List the backends installed here.")
    parser.parse_args(arguments)
    for point in sorted(backends().values(), key=lambda point: point.name):
        sys.stdout.write(f"{point.name:<10} {_describe(point)}\n{'':<10} {point.value}\n")
    sys.stdout.write('use one by name: podium train … --backend NAME, or podium.connect("NAME")\n')
    return 0


def _describe(point: EntryPoint) -> str:
    try:
        backend = point.load()
    except ImportError as error:  # a backend whose extra is not installed is still worth naming
        return f"not usable here: {error}"
    capabilities = dataclasses.asdict(_capabilities(backend))
    can = [name for name, able in capabilities.items() if able]
    cannot = [name for name, able in capabilities.items() if not able]
    return f"can: {', '.join(can) or 'only the basics'}" + (f"; cannot: {', '.join(cannot)}" if cannot else "")


def _capabilities(cls: type[Backend]) -> Capabilities:
    """What the class says of itself; where only an instance knows, one is made, and closed."""
    if hasattr(cls, "capabilities"):
        return cls.capabilities
    backend = cls()
    try:
        return backend.capabilities
    finally:
        backend.close()
