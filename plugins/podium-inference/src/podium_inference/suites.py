"""``podium eval MODEL --suite NAME:TASK``: a suite of an installed package evaluates the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import find_installed, load_installed, nearest
from podium.installed import list_entry_points

__all__ = ["PreparedSuite", "find_suite", "keep_results", "write_table"]

_GROUP: Final = "podium.suites"


class PreparedSuite(Protocol):
    """A task of a suite. An entry point of the group ``podium.suites`` is a function that returns it for a task, the
    path of ``--harness`` or None, and the arguments behind ``--``. The function raises ConfigError for what it refuses,
    before a model is loaded."""

    def run(self, config: Any, cluster: Any, name: str) -> Mapping[str, Mapping[str, float]]:
        """Evaluate the model of a configuration on a cluster. Returns figures by the names of tasks.

        Args:
            config: The settings of ``podium eval``.
            cluster: Where workers run.
            name: What the model is called.
        """
        ...


def find_suite(spec: str, program: str | None, arguments: Sequence[str]) -> PreparedSuite:
    """Return the task of a suite that ``NAME:TASK`` names, with the path of ``--harness`` and further arguments.

    Raises:
        ConfigError: No installed package has the suite, or the suite refuses the task or the arguments.
    """
    name, _, task = spec.partition(":")
    if not name or not task:
        raise ConfigError(f"--suite {spec}: expected NAME:TASK, the name of a suite and its task")
    entry = find_installed(_GROUP, name, "--suite")
    if entry is None:
        names = sorted({entry.name for entry in list_entry_points(group=_GROUP)})
        listing = f"; installed are {', '.join(names)}" if names else ""
        raise ConfigError(
            f"--suite {spec}: there is no suite {name!r}{nearest(name, names, _GROUP)}{listing}; "
            f"{explain_packages(_GROUP, name)}"
        )
    return load_installed(entry, "--suite")(task, program, arguments)


def write_table(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The lines of a table with a row for each figure and its standard error."""
    rows = [
        (task, figure, f"{value:.4f}", f"± {row[f'{figure}_stderr']:.4f}" if f"{figure}_stderr" in row else "")
        for task, row in results.items()
        for figure, value in row.items()
        if not figure.endswith("_stderr")
    ]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(4)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def keep_results(model: str, record: Mapping[str, Any], output: str | None) -> str | None:
    """Write what a suite found to the run that ``model`` belongs to, beside its evaluations, or to ``output``. Returns
    the file; None if there is no run, and no ``output``."""
    from podium.runs.files import step_name, step_of
    from podium.runs.run_files import RunFiles
    from podium.runs.run_reader import RunRecord
    from podium.runs.stored_models import find_model

    text = json.dumps({"model": model, **record}, indent=2) + "\n"
    if output is not None:
        Path(output).write_text(text, encoding="utf-8")
        return output
    if (source := find_model(model)) is None:
        return None
    step = step_of(source.checkpoint.name) if source.checkpoint is not None else RunRecord(source.run).step
    folder = RunFiles(source.run, "suites", str(record["suite"]), quote(str(record["task"]), safe=""))
    folder.make_folder()
    with folder.replace(f"{step_name(step or 0)}.json") as file:
        file.write(text.encode())
    return str(folder.absolute / f"{step_name(step or 0)}.json")
