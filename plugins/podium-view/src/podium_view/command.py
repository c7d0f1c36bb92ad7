"""``podium view`` shows runs in a browser, or writes them to one HTML file."""

import argparse
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from podium.errors import ConfigError
from podium.runs.run_files import RunFiles
from podium.telemetry.formatting import visible
from podium_view.run import Run, is_shown
from podium_view.runs import name_runs

__all__ = ["run_view"]

_MOST_RUNS: Final = 32


def run_view(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, or write it. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium view",
        description="Show runs in a browser, from their own files: curves, completions with their tokens, the "
        "timeline and failures. The page follows a run that is still training. The server listens on "
        "loopback only, and the page loads nothing from elsewhere.",
        epilog="On another machine, first forward the port: ssh -L PORT:127.0.0.1:PORT MACHINE.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, such as runs/NAME, or a directory of runs")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write one HTML file with the runs, and exit")
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1 (default: a free port)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    parsed = parser.parse_args(arguments)

    runs = [Run(path, name) for path, name in _list_directories([Path(run) for run in parsed.runs])]
    if parsed.export is not None:
        from podium_view.export import export_page

        text = export_page(runs).encode("utf-8", "replace")
        RunFiles(parsed.export.parent).write(text, parsed.export.name)
        sys.stdout.write(f"{visible(str(parsed.export))}: {len(text) / 2**20:.1f} MiB\n")
        return 0
    from podium.processes import close_memory
    from podium_view.server import ViewServer

    close_memory()

    with ViewServer(runs, parsed.port) as server:
        sys.stdout.write(f"{visible(', '.join(run.name for run in runs))}: {server.url}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        threading.Thread(target=_import_readers, daemon=True).start()
        if parsed.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def _list_directories(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each path with the shortest end of it that no other has."""
    directories = list(dict.fromkeys(run.resolve() for path in paths for run in _runs(path)))
    if len(directories) > _MOST_RUNS:
        raise ConfigError(
            f"{len(directories)} runs were named, but a page shows {_MOST_RUNS} at most: name the runs to show"
        )
    return list(zip(directories, name_runs(directories), strict=True))


def _runs(path: Path) -> Iterator[Path]:
    """The run at ``path`` and those directly below, as ``podium runs`` lists them. Raises ConfigError for none."""
    if not path.is_dir():
        raise ConfigError(f"{path}: this directory does not exist; give the directory of a run")
    yield from [folder for folder in (path, *sorted(path.iterdir())) if is_shown(folder)] or [path]


def _import_readers() -> None:
    """Import what completions are read with, while the first picture is drawn."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401 - the import is the purpose
