"""``podium eval MODEL`` and ``podium sample MODEL``. MODEL is a run, a checkpoint, a directory or a hub name."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import podium
from podium.cli.connecting import Backend, parse_with_backend
from podium.cli.interruption import explained
from podium.cli.spinner import StatusSink, write_note
from podium.config import build_config, fill_masked, parse_overrides, read_values, with_overrides
from podium.errors import ConfigError
from podium.models.config import ModelConfig
from podium.rollout.engines.config import REPLAY
from podium.runs.config import InferenceConfig, choose_engine_dtype
from podium.runs.named_code import check_code
from podium.runs.named_files import find_current_values, is_needed, remarks
from podium.runs.recipes import find_recipe, recipe_of
from podium.runs.run_reader import RunRecord, flatten, is_run
from podium.spelling import write_count
from podium.telemetry import subscribe
from podium.telemetry.formatting import visible
from podium.training import ParallelConfig
from podium.training.config import Precision
from podium_inference.unread_settings import (
    ListUnread,
    list_unread_by_best,
    list_unread_by_eval,
    list_unread_by_sample,
    list_unread_by_service,
    refuse_unread,
)

if TYPE_CHECKING:
    from podium.runs.evaluation import Evaluation
    from podium.telemetry.held_out import Metric

__all__ = ["connect", "inference_config", "model_parser", "open_config", "run_eval", "run_sample"]

_SAMPLES: Final = 3
_COMPUTES: Final = ("dtype", "attention")  # of the section model: how the weights of a run compute, wherever they are
_WRITES_PROMPTS: Final = ("data.chat_template",)
_SCORES: Final = ("data.eval", "data.chat_template", "environment", "reward")


def run_eval(arguments: Sequence[str]) -> int:
    """Score a model on the held-out data of each set and print the results. Returns the exit status."""
    parser = model_parser("eval", "Score a model on held-out prompts.")
    parser.add_argument(
        "--suite",
        metavar="NAME:TASK",
        help="evaluate the model on TASK by a suite of an installed package; arguments after -- go to the suite",
    )
    parser.add_argument("--harness", metavar="PATH", help="the command that the suite starts, if it is not on the path")
    parser.add_argument("--output", metavar="FILE", help="write the results of a suite to this file")
    arguments, further = _split_arguments(arguments)
    options, overrides, backend = parse_with_backend(parser, arguments, default="local")
    if options.suite is not None:
        return _run_suite(options, overrides, backend, further)
    if further or options.harness or options.output:
        raise ConfigError("--harness, --output and arguments after -- belong to --suite NAME:TASK: give it")
    evaluations, status = dict[str, "Evaluation"](), StatusSink(f"loading {options.model}")
    with (
        explained(lambda: _describe_finished(evaluations, status.activity)),
        contextlib.ExitStack() as results,
        status,
        open_config(options.model, options.config, overrides, list_unread_by_eval, needs=_SCORES) as config,
        connect(backend) as cluster,
    ):
        from podium_inference.evaluation import evaluate_model

        results.callback(_write_evaluations, config, evaluations)  # of the sets that are done, if a signal ends it
        step, precision = _read_step(options, overrides), _read_precision(options.model)
        evaluate_model(config, cluster, step=step, evaluations=evaluations, precision=precision)
    return 0


def _read_step(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Return the number of steps that the model has finished in its run; 0 where the model is of no run, or where
    ``model.path`` is that of another one."""
    from podium.runs.stored_models import find_model

    section = read_values(InferenceConfig, options.config, overrides).get("model", {})
    source = find_model(str(section.get("path", options.model)))
    return 0 if source is None else source.step


def _read_precision(model: str) -> Precision | Mapping[str, Any]:
    """Return the data type in which the run that trained ``model`` scored rows; "auto" where no run did."""
    from podium.runs.stored_models import find_model

    source = find_model(model)
    return "auto" if source is None else source.values.get("parallel", {}).get("precision", "auto")


def _describe_finished(evaluations: Mapping[str, Evaluation], activity: str) -> str:
    """What an evaluation has done that a signal ended while it was at ``activity``."""
    sets = ", ".join(filter(None, evaluations))
    results = f"the results of {sets or 'the only set'} are above" if evaluations else "no set was evaluated to its end"
    return f"{results}, and nothing else is kept; it was {activity}"


def _write_evaluations(config: InferenceConfig, evaluations: Mapping[str, Evaluation]) -> None:
    """Print the figures of each set, and then some samples of each."""
    from podium.runs.metric_choice import choose_metric

    for name, evaluation in evaluations.items():
        judge, _ = choose_metric(config, next(iter(evaluations.values())))
        sys.stdout.write(f"set       {name}\n" if name else "")
        sys.stdout.writelines(f"{line}\n" for line in _describe(evaluation, judge))
    for name, evaluation in evaluations.items():
        for sample in evaluation.samples[:_SAMPLES]:
            sys.stdout.write(f"\nset       {name}\n" if name else "\n")
            sys.stdout.write(
                f"prompt    {sample.prompt!r}\nanswer    {sample.completion!r}{', cut off' * sample.cut_off}\n"
            )
            sys.stdout.write(f"expected  {sample.expected!r}  reward {sample.reward:g}\n")
    sys.stdout.flush()


def _split_arguments(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments before and behind ``--``."""
    place = [*arguments, "--"].index("--")
    return arguments[:place], arguments[place + 1 :]


def _run_suite(options: argparse.Namespace, overrides: Sequence[str], backend: Backend, further: Sequence[str]) -> int:
    """Have a suite evaluate the model, and print and keep its results. Returns the exit status."""
    from podium_inference.suites import find_suite, keep_results, write_table

    suite = find_suite(options.suite, options.harness, further)
    name = Path(options.model).name or options.model
    with (
        explained(lambda: "the suite has given no results, and nothing is kept"),
        StatusSink(f"loading {options.model}"),
        open_config(options.model, options.config, overrides, list_unread_by_service) as config,
        connect(backend) as cluster,
    ):
        results = suite.run(config, cluster, name)
    sys.stdout.writelines(f"{line}\n" for line in write_table(results))
    harness, _, task = options.suite.partition(":")
    record = {"suite": harness, "task": task, "arguments": [*further], "results": results}
    if (file := keep_results(options.model, record, options.output)) is not None:
        sys.stdout.write(f"{file}\n")
    return 0


def _describe(evaluation: Evaluation, judge: Metric) -> Iterator[str]:
    """The figures of an evaluation, a line each: that of the metric ``judge`` first, and with its interval."""
    from podium.telemetry.held_out import Metric

    names = sorted(evaluation.figures, key=lambda name: name != judge.name)
    width = max(9, *(len(Metric(name).title) for name in names))
    for name in names:
        metric, value = Metric(name), evaluation.figures[name]
        line = f"{metric.title:<{width}} {metric.write(value)}"
        bounds = evaluation.interval(name)
        if metric == judge:
            items = write_count(evaluation.count(name), "item")
            if evaluation.counts_items(name):
                items = f"{round(value * evaluation.count(name))} of {evaluation.count(name)}"
            interval = "" if bounds is None else f"; 95% interval {' to '.join(map(metric.write, bounds))}"
            line += f"  ({items}{interval})"
        yield line


def run_sample(arguments: Sequence[str]) -> int:
    """Print a model's completions of prompts. Returns the exit status."""
    parser = model_parser("sample", "Print completions of prompts. Each prompt is completed on its own.")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="complete this prompt and exit; may be given several times; without it, the lines of stdin are prompts",
    )
    parser.add_argument(
        "--best",
        metavar="FILE",
        help="draw sampling.n completions of each prompt of data.train, and write the one with the highest reward to "
        "this new .jsonl file, as a row for podium train sft; with reward.correct_at only correct ones",
    )
    options, overrides, backend = parse_with_backend(parser, arguments, default="inline")
    if options.best is not None:
        return _write_best(options, overrides, backend)
    prompts: Iterable[str] = options.prompt if options.prompt is not None else _read_typed_prompts()
    answered = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(explained(lambda: f"{write_count(answered, 'prompt was', 'prompts were')} completed"))
        with StatusSink(f"loading {options.model}"):
            config = stack.enter_context(open_config(options.model, options.config, overrides, list_unread_by_sample))
            from podium_inference.evaluation import open_sampler

            sample = stack.enter_context(open_sampler(config, stack.enter_context(connect(backend))))
        stack.callback(subscribe(write_note))
        several = not sys.stdin.isatty() if options.prompt is None else len(options.prompt) > 1
        for number, prompt in enumerate(prompts):
            completions = list(sample(prompt, number))
            for place, completion in enumerate(completions, 1):
                if several or len(completions) > 1:
                    sys.stdout.write(f"--- prompt {number + 1}, completion {place}\n")
                sys.stdout.write((visible(completion) if sys.stdout.isatty() else completion) + "\n")
            sys.stdout.flush()
            answered += 1
    return 0


def _write_best(options: argparse.Namespace, overrides: Sequence[str], backend: Backend) -> int:
    """Write the best completions of the training prompts. Returns the exit status."""
    if options.prompt is not None:
        raise ConfigError("--best takes the prompts of data.train: leave out --prompt")
    if (path := Path(options.best)).exists():
        raise ConfigError(f"--best {path}: this file exists; give another, or remove it")
    from podium_inference.best_of_n import BestOfN, draw_best

    count, needs = BestOfN(), ("data.train", *_SCORES)
    with (
        explained(
            lambda: (
                f"{path} has the best of {write_count(count.kept, 'prompt')}" if path.exists() else "nothing is kept"
            )
        ),
        StatusSink(f"loading {options.model}"),
        open_config(options.model, options.config, overrides, list_unread_by_best, needs=needs) as config,
        connect(backend) as cluster,
    ):
        rows = draw_best(config, cluster, count, step=_read_step(options, overrides))
        first = next(rows, None)  # what is refused leaves no file
        with path.open("x", encoding="utf-8") as file:
            for row in itertools.chain([] if first is None else [first], rows):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    left_out = {
        "no completion is correct (reward.correct_at)": count.wrong,
        "each completion was cut off or left out": count.unfinished,
    }
    reasons = "".join(
        f"; {write_count(number, 'prompt has', 'prompts have')} none: {why}"
        for why, number in left_out.items()
        if number
    )
    sys.stdout.write(
        f"{path}: the best of {write_count(config.sampling.n, 'completion')} of "
        f"{write_count(count.kept, 'prompt')}{reasons}\n"
    )
    return 0


@contextlib.contextmanager
def open_config(
    model: str,
    path: str | None,
    overrides: Sequence[str],
    list_unread: ListUnread,
    *,
    needs: Sequence[str] = _WRITES_PROMPTS,
) -> Iterator[InferenceConfig]:
    """Yield the configuration to use ``model`` with. A checkpoint's model is written beside its run during the block.

    Lines on stderr say which files have moved or changed since the run began.

    Raises:
        ConfigError: As :func:`inference_config`. Or one of ``overrides`` is of those that ``list_unread`` returns,
            which the command does not read.
        CheckpointError: The checkpoint is damaged.
    """
    _refuse_early(model, path, overrides)
    from podium.runs.stored_models import find_model
    from podium_inference.export import open_model

    config = inference_config(model, path, overrides, needs)
    refuse_unread(overrides, list_unread(config))
    source = find_model(model)
    if source is not None:
        for remark in remarks(config, source.run, _with_train(needs, bool(config.data.eval))):
            sys.stderr.write(f"{visible(remark)}\n")
        for key, text in RunRecord(source.run).of_script.items():
            if key.startswith("script.") and key != "script.data":
                sys.stderr.write(f"the run had {text}, as its {key.removeprefix('script.')}, which is not used here\n")
    if source is None or config.model.path != str(source.checkpoint or source.run / "model"):
        yield config
        return
    with open_model(source) as folder:
        yield dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def inference_config(
    model: str, path: str | None, overrides: Sequence[str], needs: Sequence[str] = _WRITES_PROMPTS
) -> InferenceConfig:
    """Return the configuration to use ``model`` with: that of its run if it has one, changed by the file ``path``, and
    then by ``overrides``.

    For a checkpoint, ``model.path`` is its directory. The model of a run computes in the data types in which the run
    has drawn its completions, so that its figures are those of the run.

    Raises:
        ConfigError: The run has neither a final model nor the checkpoint, the directory is neither run nor model,
            settings are wrong, or a file that the run was started with is gone and ``needs`` has its key or section. Or
            the run names code that this user has not allowed.
    """
    from podium.runs.stored_models import find_model

    values: dict[str, Any] = {}
    source = find_model(model)
    if source is not None:
        sections = {field.name for field in dataclasses.fields(InferenceConfig)}
        values = {name: section for name, section in source.values.items() if name in sections}
        # training samples several completions of a prompt, and these commands sample one
        values.get("sampling", {}).pop("n", None)
        stored = {key: value for key, value in values.get("model", {}).items() if key in _COMPUTES}
        values["model"] = {**stored, "path": str(source.checkpoint or source.run / "model")}
        values |= _evaluation(recipe_of(source.values), values, model)
        if (engine := values.get("engine", {})).get("name") == REPLAY:  # the run sampled nothing itself
            values["engine"] = {key: value for key, value in engine.items() if key not in ("name", "options")}
    else:
        _check_model(model)
    if source is not None and "reward" not in needs:  # answers are not graded, and there are no sessions
        values = {name: section for name, section in values.items() if name not in ("reward", "environment")}
    for name, section in read_values(InferenceConfig, path).items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    values = with_overrides(InferenceConfig, values, overrides)
    values.setdefault("model", {}).setdefault("path", model)
    if source is not None:
        values = _compute_as_trained(fill_masked(values), source.values.get("parallel", {}))
        values, missing = find_current_values(values, source.run)
        data = values.get("data")
        needs = _with_train(needs, isinstance(data, dict) and bool(data.get("eval")))
        if gone := [f"{line}; give its place with --{key}" for key, line in missing.items() if is_needed(key, needs)]:
            raise ConfigError("\n".join(gone))
    config = build_config(InferenceConfig, values)
    typed_keys = [key for key, _ in parse_overrides(InferenceConfig, overrides)]
    if path is not None:
        config = config.check_source(Path(path), typed_keys)
        typed_keys += [key for key, _ in flatten(read_values(InferenceConfig, path))]
    if source is not None:
        check_code(source.run, config, typed_keys, None if "reward" in needs else ("engine",))
    return config


def _compute_as_trained(values: dict[str, Any], parallel: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the data type in which a run with these settings of ``parallel`` draws completions."""
    engine, model = values.get("engine") or {}, values["model"]
    dtype = choose_engine_dtype(build_config(ParallelConfig, parallel), model.get("dtype", ModelConfig.dtype))
    return {**values, "engine": {**engine, "dtype": dtype}} if dtype and engine.get("dtype") is None else values


def _evaluation(recipe: str, values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The section ``eval`` with which the model of a run is evaluated; {} where it is the run's own.

    Raises:
        ConfigError: The model writes no completions.
    """
    section = values.get("eval", {})
    metric = str(section.get("metric", "auto"))
    chosen = find_recipe(recipe).choose_metric(metric, model)
    return {} if chosen == metric else {"eval": {**section, "metric": chosen}}


def _with_train(needs: Sequence[str], held_out: bool) -> Sequence[str]:
    """Return ``needs``, and the training data if there is no other source of held-out data."""
    return needs if held_out or "data.eval" not in needs else (*needs, "data.train")


def model_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command whose first argument is a model."""
    parser = argparse.ArgumentParser(
        prog=f"podium {command}",
        usage=f"podium {command} MODEL [--SECTION.KEY VALUE ...] [options]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run (its final model, or else its latest checkpoint), RUN@STEP, RUN@best, the directory of a "
        "checkpoint or of a model, or a hub name",
    )
    parser.add_argument("--config", metavar="FILE", help="read settings from this YAML file")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def connect(backend: Backend) -> podium.Cluster:
    """Connect to a backend whose processes import what a model needs at once."""
    from podium.trainer import PRELOAD

    return podium.connect(backend.name, hints={"preload": PRELOAD}, **backend.options)


def _refuse_early(model: str, path: str | None, overrides: Sequence[str]) -> None:
    """Refuse wrong settings and wrong paths of a model that belongs to no run. This imports no torch."""
    folder = Path(model)
    if "@" in model or any(is_run(folder) for folder in (folder, *list(folder.parents)[:2])):
        return
    _check_model(model)
    values = read_values(InferenceConfig, path, overrides)
    build_config(InferenceConfig, {**values, "model": {"path": model, **values.get("model", {})}})


def _check_model(model: str) -> None:
    """Refuse a path without a model. A name such as A/B is a path if the directory A exists, and a hub name
    otherwise."""
    path, meant = Path(model), model.startswith((".", "~", "/")) or model.endswith("/")
    if os.path.isdir(path):
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(f"{path} is no run (it has no config.yaml) and no model (it has no config.json)")
    elif meant or os.path.exists(path) or (len(path.parts) > 1 and os.path.isdir(path.parts[0])):
        raise ConfigError(f"no run and no model at {model}")


def _read_typed_prompts() -> Iterator[str]:
    """Yield the lines of stdin that are not empty. On a terminal, ``> `` is shown before each."""
    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                yield line
