"""Evaluation harnesses as suites of ``podium eval MODEL --suite HARNESS:TASK``: a harness, as it is installed, asks the
model that Podium serves.

podium eval ── served() ─▶ http://127.0.0.1:PORT/v1 ◀─ requests ── lm_eval | lighteval | inspect, a subprocess
    └───────────── reads its results ◀─────────────────── a folder that is removed afterwards
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from podium.errors import ConfigError, PodiumError

__all__ = ["INSPECT", "LIGHTEVAL", "LM_EVAL", "Harness", "HarnessTask"]

Results = dict[str, dict[str, float]]
"""Figures by the names of tasks. The standard error of a figure NAME is NAME_stderr."""

_BY_TEMPLATE: Final = "--apply_chat_template"  # of lm-eval, which takes the beginning of an argument, too
_END_S: Final = 10.0
_OFFLINE_COSTS: Final = "LITELLM_LOCAL_MODEL_COST_MAP"  # else litellm fetches a list of prices from GitHub
_STDERR: Final = 2  # the descriptor: sys.stderr may have none


@dataclass(frozen=True)
class Served:
    """A served model, as a harness is to ask it.

    Attributes:
        name: The model's name there.
        url: The address below which ``/completions`` is.
        folder: The directory of the model's tokenizer.
        positions: The longest sequence that it takes; None if nobody knows.
        begins_texts: Whether a text is read with the token of a beginning before it, which no chat template writes.
    """

    name: str
    url: str
    folder: str
    positions: int | None
    begins_texts: bool = False


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

        The model has another name each time: lighteval keeps answers of a model by its name, and would give those of
        one checkpoint to the next.

        Raises:
            PodiumError: The harness failed, got no answer, or left no results. Its own output is on stderr.
        """
        from podium.models import load_tokenizer
        from podium.models.loading import position_limit
        from podium_agents.proxies import spare_proxy
        from podium_agents.services import load_service

        harness, token = self.harness, secrets.token_urlsafe(32)
        name = f"{name}-{secrets.token_hex(4)}"
        service = load_service(f"--suite {harness.name}")
        with (
            tempfile.TemporaryDirectory(prefix="podium-suite-") as folder,
            service.served(config, cluster, model=name, token=token) as model,
        ):
            tokenizer, results = Path(folder, "tokenizer"), Path(folder, "results")
            loaded = load_tokenizer(config.model.tokenizer_source)
            loaded.save_pretrained(tokenizer)
            results.mkdir()
            url, positions = f"{spare_proxy(model.url)}/v1", position_limit(config.model)
            begins_texts = _begins_texts(loaded) and not _asks_conversations(self.arguments)
            served_model = Served(name, url, str(tokenizer), positions, begins_texts)
            arguments = [*harness.arguments(served_model, self.task, str(results)), *self.arguments]
            env = {_OFFLINE_COSTS: "True", **os.environ, "OPENAI_API_KEY": token, "OPENAI_BASE_URL": served_model.url}
            status = _run([self.program, *arguments], env)
            if status:
                raise PodiumError(f"{harness.name} ended with status {status}; its output above says why")
            _check_answers(harness.name, _count_requests(model.url, token))
            try:
                return harness.read(results)
            except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
                raise PodiumError(
                    f"{harness.name} ended and left no results that can be read ({type(error).__name__}: {error}): "
                    "this version may write them in another form"
                ) from None


def _count_requests(url: str, token: str) -> Counter[str] | None:
    """Return how many requests for completions the service at ``url`` has had, by the status of its reply; None for a
    service that does not count them."""
    address, counts = urlsplit(url), Counter[str]()
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_END_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        text = response.read().decode()
    if response.status != http.HTTPStatus.OK:
        return None
    for path, status, count in re.findall(r'podium_requests_total\{path="(/v1/\w[^"]*)",code="(\d+)"\} (\d+)', text):
        if path != "/v1/models":
            counts[status] += int(count)
    return counts


def _check_answers(harness: str, counts: Counter[str] | None) -> None:
    """Check that the model has answered the harness. A warning counts requests without an answer.

    lighteval counts an answer that it does not get as an empty one, and ends as if all was well.

    Raises:
        PodiumError: There was no answer.
    """
    if counts is None:
        return
    refused = ", ".join(f"{count} with status {status}" for status, count in sorted(counts.items()) if status != "200")
    if not counts["200"]:
        raise PodiumError(
            f"{harness} ended, and the model has answered none of its requests ({refused or 'there were none'}), so "
            "that its figures mean nothing; its output above says why"
        )
    if refused:
        sys.stderr.write(
            f"warning: of the requests of {harness} {counts['200']} were answered and others were not ({refused}); the "
            "figures may count them as wrong answers\n"
        )


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


def _begins_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer puts the token of a beginning before a text, and nothing behind it.

    lm-eval can only ask for both, and would ask the model to go on behind the end of a text.
    """
    ids = list(tokenizer("")["input_ids"])
    return tokenizer.bos_token_id is not None and ids == [tokenizer.bos_token_id]


def _asks_conversations(arguments: Sequence[str]) -> bool:
    """Whether lm-eval is to write its requests by the chat template, which writes a token of a beginning itself."""
    names = [argument.partition("=")[0] for argument in arguments]
    return any(len(name) > 2 and _BY_TEMPLATE.startswith(name) for name in names)


def _ask_lm_eval(model: Served, task: str, folder: str) -> list[str]:
    where = {
        "model": model.name,
        "base_url": f"{model.url}/completions",
        "num_concurrent": "8",
        "tokenizer_backend": "huggingface",
        "tokenizer": model.folder,
        "tokenized_requests": "True",
        **({"max_length": str(model.positions)} if model.positions else {}),
        **({"add_bos_token": "True"} if model.begins_texts else {}),
    }
    settings = ",".join(f"{key}={value}" for key, value in where.items())
    return ["run", "--tasks", task, "--model", "local-completions", "--model_args", settings, "--output_path", folder]


def _ask_lighteval(model: Served, task: str, folder: str) -> list[str]:
    settings = f"model_name=openai/{model.name},base_url={model.url},cache_dir={folder}/cache"
    if model.positions:  # else it asks openrouter.ai for them
        settings += f",max_model_length={model.positions}"
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
            raise PodiumError(
                f"the task {log['eval']['task']} ended as {log.get('status')}; the output of inspect above says why"
            )
        row = results.setdefault(str(log["eval"]["task"]), {})
        scores = log["results"]["scores"]
        scorers = Counter(score["name"] for score in scores)
        for score in scores:  # a scorer has one for each way to reduce epochs
            scorer = score["name"] if scorers[score["name"]] == 1 else f"{score['name']}/{score['reducer']}"
            for name, metric in score["metrics"].items():
                row[f"{scorer}/{name}"] = float(metric["value"])
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
_LIGHTEVAL: Final = (
    "pip install 'lighteval[litellm]' 'litellm<1.106' 'xxhash<4'"  # lighteval 0.13 breaks with newer ones
)
LIGHTEVAL: Final = Harness("lighteval", "lighteval", _LIGHTEVAL, _ask_lighteval, _read_tasks)
LM_EVAL: Final = Harness("lm-eval", "lm_eval", "pip install 'lm-eval[api]' transformers", _ask_lm_eval, _read_tasks)
