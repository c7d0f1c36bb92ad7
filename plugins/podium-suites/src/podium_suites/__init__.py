"""Evaluation harnesses as suites of ``podium eval MODEL --suite HARNESS:TASK``: a harness, as it is installed, asks the
model that Podium serves.

podium eval ── served() ─▶ http://127.0.0.1:PORT/v1 ◀─ requests ── lm_eval | lighteval | inspect, a subprocess
    └───────────── reads its results ◀─────────────────── a folder that is removed afterwards
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podium.errors import ConfigError, PodiumError

__all__ = ["INSPECT", "LIGHTEVAL", "LM_EVAL", "Harness", "HarnessTask"]

Results = dict[str, dict[str, float]]
"""Figures by the names of tasks. The standard error of a figure NAME is NAME_stderr."""

_END_S: Final = 10.0
_STDERR: Final = 2  # the descriptor: sys.stderr may have none


@dataclass(frozen=True)
class Served:
    """A served model, as a harness is to ask it.

    Attributes:
        name: The model's name there.
        url: The address below which ``/completions`` is.
        folder: The directory of the model's tokenizer.
        positions: The longest sequence that it takes; None if nobody knows.
    """

    name: str
    url: str
    folder: str
    positions: int | None


@dataclass(frozen=True)
class Harness:
    """An evaluation harness: an entry point of the group ``podium.suites``.

    Attributes:
        name: Its name.
        command: The name of its command.
        install: What installs it.
        arguments: Its arguments, of a served model, a task and a folder for results.
        read: Reads the results in that folder.
    """

    name: str
    command: str
    install: str
    arguments: Callable[[Served, str, str], list[str]]
    read: Callable[[Path], Results]

    def __call__(self, task: str, program: str | None, arguments: Sequence[str]) -> HarnessTask:
        """Return a task of the harness. ``program`` is the path of its command, if it is not on the path.

        Raises:
            ConfigError: The harness is not installed.
        """
        path = shutil.which(program or self.command)
        if path is None:
            where = f"there is no command {program}" if program else f"its command {self.command} is not on the path"
            raise ConfigError(
                f"--suite {self.name}:{task} needs {self.name}, and {where}: {self.install}, best in an environment of "
                "its own, and give the path of its command by --harness, as in --harness "
                f"~/{self.name}/bin/{self.command}"
            )
        return HarnessTask(self, task, path, arguments)


@dataclass(frozen=True)
class HarnessTask:
    """A task of a harness that is installed.

    Attributes:
        harness: The harness.
        task: What it evaluates, as it is called there.
        program: Path of its command.
        arguments: Further arguments of the user's.
    """

    harness: Harness
    task: str
    program: str
    arguments: Sequence[str]

    def run(self, config: Any, cluster: Any, name: str) -> Results:
        """Serve the model while the harness asks it. Returns the figures of the harness.

        Raises:
            PodiumError: The harness failed, or left no results. Its own output is on stderr.
        """
        from podium.models import load_tokenizer
        from podium.models.loading import longest_text
        from podium.rollout.services import load_service

        harness, token = self.harness, secrets.token_urlsafe(32)
        service = load_service(f"--suite {harness.name}")
        with (
            tempfile.TemporaryDirectory(prefix="podium-suite-") as folder,
            service.served(config, cluster, model=name, token=token) as model,
        ):
            tokenizer, results = Path(folder, "tokenizer"), Path(folder, "results")
            load_tokenizer(config.model.tokenizer_source).save_pretrained(tokenizer)
            results.mkdir()
            served_model = Served(name, f"{model.url}/v1", str(tokenizer), longest_text(config.model))
            arguments = [*harness.arguments(served_model, self.task, str(results)), *self.arguments]
            env = {**os.environ, "OPENAI_API_KEY": token, "OPENAI_BASE_URL": served_model.url}
            status = _run([self.program, *arguments], env)
            if status:
                raise PodiumError(f"{harness.name} ended with status {status}; its output above says why")
            try:
                return harness.read(results)
            except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
                raise PodiumError(
                    f"{harness.name} ended and left no results that can be read ({type(error).__name__}: {error}): "
                    "this version may write them in another form"
                ) from None


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command whose output goes to stderr, and end it with the block. Returns its status."""
    sys.stderr.write(f"{shlex.join(command)}\n")
    sys.stderr.flush()
    with _ending(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=_STDERR)) as process:
        return process.wait()


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ask_lm_eval(model: Served, task: str, folder: str) -> list[str]:
    where = {
        "model": model.name,
        "base_url": f"{model.url}/completions",
        "num_concurrent": "8",
        "tokenizer_backend": "huggingface",
        "tokenizer": model.folder,
        "tokenized_requests": "True",
        **({"max_length": str(model.positions)} if model.positions else {}),
    }
    settings = ",".join(f"{key}={value}" for key, value in where.items())
    return ["run", "--tasks", task, "--model", "local-completions", "--model_args", settings, "--output_path", folder]


def _ask_lighteval(model: Served, task: str, folder: str) -> list[str]:
    settings = f"model_name=openai/{model.name},base_url={model.url}"
    return ["endpoint", "litellm", settings, task, "--output-dir", folder]


def _ask_inspect(model: Served, task: str, folder: str) -> list[str]:
    address = ["--model", f"openai/{model.name}", "--model-base-url", model.url]
    return ["eval", task, *address, "--log-dir", folder, "--log-format", "json", "--display", "plain"]


def _read_tasks(folder: Path) -> Results:
    """The results of lm-eval and of lighteval: ``{"results": {TASK: {METRIC: value}}}``."""
    file = next(iter(sorted(folder.rglob("results_*.json"), reverse=True)))
    tasks: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return {task: _name_figures(row) for task, row in tasks.items() if _name_figures(row)}


def _name_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task. lm-eval calls them METRIC,FILTER, and their errors METRIC_stderr,FILTER."""
    figures: dict[str, float] = {}
    for key, value in row.items():
        name, _, chosen = key.partition(",")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        plain, error = (name.removesuffix("_stderr"), "_stderr") if name.endswith("_stderr") else (name, "")
        if name != "sample_len":
            figures[plain + (f",{chosen}" if chosen not in ("", "none") else "") + error] = float(value)
    return figures


def _read_inspect(folder: Path) -> Results:
    """The logs of inspect: ``{"eval": {"task": …}, "results": {"scores": [{"name": …, "metrics": {…}}]}}``."""
    results: Results = {}
    for file in sorted(folder.rglob("*.json")):
        log = json.loads(file.read_text())
        if "eval" not in log:
            continue
        if log.get("status") != "success":
            raise ValueError(f"the task {log['eval']['task']} ended as {log.get('status')}")
        row = results.setdefault(str(log["eval"]["task"]), {})
        for score in log["results"]["scores"]:
            for name, metric in score["metrics"].items():
                row[f"{score['name']}/{name}"] = float(metric["value"])
    if not results:
        raise ValueError("no log")
    return {
        task: {
            (f"{name.rpartition('/')[0]}/accuracy_stderr" if name.endswith("/stderr") else name): value
            for name, value in row.items()
        }
        for task, row in results.items()
    }


INSPECT: Final = Harness("inspect", "inspect", "pip install inspect-ai openai", _ask_inspect, _read_inspect)
LIGHTEVAL: Final = Harness("lighteval", "lighteval", "pip install 'lighteval[litellm]'", _ask_lighteval, _read_tasks)
LM_EVAL: Final = Harness("lm-eval", "lm_eval", "pip install 'lm-eval[api]' transformers", _ask_lm_eval, _read_tasks)
