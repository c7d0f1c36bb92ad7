"""One start of a run, in a fork of this process. The fork ends itself where it is told to.

This process imports what runs need and computes nothing, so that its forks begin at once and may compute.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.resumes.draws import Case, End

__all__ = ["Outcome", "import_ahead", "start"]

_MODULES: Final = (
    *("transformers.models.qwen3.modeling_qwen3", "pyarrow.parquet", "pandas", "peft", "podium_native.engine"),
    *("podium.trainer.sft", "podium.trainer.ppo", "podium_preferences.trainer", "podium_agents.rollout"),
    *("podium_algorithms.losses", "podium.backends.inline", "podium.backends.local.backend", "podium_curves.drawing"),
)
_CHANGES: Final = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


class Outcome(NamedTuple):
    """How a start of a run ended: finished, stopped, killed, refused or failed. ``moments`` is how many passed."""

    ended: str
    moments: int = 0
    steps: int = 0
    text: str = ""


def import_ahead() -> None:
    """Import what runs need, once for all forks."""
    from podium.trainer.preload import LATER, PRELOAD

    for module in (*PRELOAD, *LATER, *_MODULES):
        importlib.import_module(module)


def start(case: Case, folder: Path, end: End | None = None, whole: Outcome | None = None) -> Outcome:
    """Start or resume the run of ``case`` in a fork, and wait for it. It ends at ``end`` of what ``whole`` was."""
    report = folder / "outcome.json"
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    if not (pid := os.fork()):
        os.setsid()
        status = 1
        try:
            output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            report.write_text(json.dumps(_run(case, end, whole)))
            status = 0
        except BaseException:  # noqa: BLE001 - nothing of the fork may go on as its parent
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # a grader, if its end has not reached it yet
    if os.WIFSIGNALED(status):
        return Outcome("killed", text=signal.Signals(os.WTERMSIG(status)).name)
    if not report.exists():
        return Outcome("failed", text=(folder / "output").read_text(errors="replace")[-2000:])
    return Outcome(*json.loads(report.read_text()))


class _Moments:
    """Counts the moments of a run in this process, and ends the process at one of them.

    A moment is a change to a file by this process, the end of a stage or the end of a step.
    """

    def __init__(self, fatal: int, stop: int) -> None:
        self.passed = self.step = 0
        self._fatal, self._stop = fatal, stop
        self._lock = threading.Lock()

    def _pass(self) -> None:
        with self._lock:
            self.passed += 1
            if self.passed == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: Any) -> None:
        """See what Python tells its audit hooks."""
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in _CHANGES:
            self._pass()

    def see(self, event: Any) -> None:
        """See an event of the run."""
        from podium.telemetry import StageFinished, StepFinished

        if isinstance(event, StageFinished | StepFinished):
            self._pass()
        if isinstance(event, StepFinished):
            self.step = event.step
            if event.step == self._stop:
                os.kill(os.getpid(), signal.SIGTERM)


def _run(case: Case, end: End | None, whole: Outcome | None) -> Outcome:
    from podium.config import build_config
    from podium.errors import ConfigError, DataError
    from podium.runs.recipes import find_recipe
    from podium.telemetry import subscribe

    fatal = stop = 0
    if end is not None and whole is not None:
        fatal = (end.kind == "kill") * (1 + int(end.share * whole.moments))
        stop = (end.kind == "stop") * (1 + int(end.share * max(1, whole.steps - 1)))
    moments = _Moments(fatal, stop)
    try:
        recipe = find_recipe(case.recipe)
        config: Any = build_config(recipe.config, case.settings)
        sys.addaudithook(moments.audit)
        subscribe(moments.see)
        summary = recipe.load_trainer()(config, cluster=case.backend, show=False, report=False).fit()
    except (ConfigError, DataError) as error:
        return Outcome("refused", moments.passed, moments.step, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever ends the run is what is looked at
        traceback.print_exc()
        return Outcome("failed", moments.passed, moments.step, f"{type(error).__name__}: {error}")
    return Outcome("finished" if summary.finished else "stopped", moments.passed, summary.steps)
