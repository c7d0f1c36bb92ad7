"""A run's rows as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Row

END = "<!-- end -->"  # of a section that a program writes
LIBRARIES = ("podium", "torch", "transformers", "numpy")


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Podium beside floors and peers (a ratio over 1: Podium is better)", title_justify="left")
    table.add_column("figure")
    table.add_column("Podium", justify="right")
    table.add_column("unit")
    table.add_column("quartiles", justify="right", style="dim")
    table.add_column("beside it")
    table.add_column("floor")
    for row in rows:
        low, high = row.quartiles
        beside = "   ".join(f"{name} {row.others[name]:.4g} ({ratio:.2f}x)" for name, ratio in row.ratio.items())
        table.add_row(row.name, f"{row.median:.4g}", row.unit, f"{low:.4g} to {high:.4g}", beside, row.floor)
    return table


def show(console: Console, rows: Sequence[Row], absent: set[str]) -> None:
    console.print(table_of(rows))
    for peer in sorted(absent):
        console.print(f"peer {peer}: not installed, left out; `make bench-peers` installs it", style="yellow")


def processor() -> str:
    """The processor's name as the kernel knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def library_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


def machine(load_before: float) -> dict[str, object]:
    """What a reader needs to judge the figures: the machine, its load and the versions."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "python": platform.python_version(),
        "libraries": library_versions(),
    }


def put_section(page: str, text: str, mark: str) -> str:
    """``page`` with ``text`` between the marker ``mark`` and the end.

    Raises:
        ValueError: The page lacks the markers.
    """
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {mark} … {END}")
    return f"{before}{begin}\n{text.rstrip()}\n{end}{after}"
