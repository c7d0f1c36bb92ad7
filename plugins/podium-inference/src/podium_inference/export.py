"""Models of runs, written for other libraries."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from podium.config import parse_overrides
from podium.errors import CheckpointError, ConfigError, DataError
from podium.models.config import ModelConfig
from podium.runs.checkpoint_folders import StoredCheckpoints, TrainerState, files_of
from podium.runs.config import InferenceConfig
from podium.runs.evaluation import Evaluation, gain
from podium.runs.files import check_path
from podium.runs.named_files import as_given, read_objects
from podium.runs.recipes import find_recipe, recipe_of
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import flatten, name_data
from podium.runs.stored_models import StoredModel
from podium.secrecy import mask
from podium.spelling import write_count
from podium.telemetry.formatting import visible
from podium.telemetry.held_out import Metric

__all__ = ["export_model", "open_model"]

_CARD: Final = "README.md"
_POLICY: Final = "policy"
_MODEL_FILES: Final = re.compile(
    r"[^/]+\.safetensors(\.index\.json)?|(generation_|adapter_|tokenizer_|processor_|(video_)?preprocessor_)?config\.json"
    r"|(tokenizer|special_tokens_map|added_tokens|vocab|chat_template|tekken)\.json|vocab\.txt|merges\.txt"
    r"|[^/]+\.(model|tiktoken|jinja)|additional_chat_templates/[^/]+\.jinja"
)
_OF_RESUME: Final = ("resume", "manifest.json")  # of a checkpoint, from which a run resumes
_logger = logging.getLogger(__name__)
_TOLD: Final = (
    *("algorithm.advantage", "algorithm.loss", "algorithm.kl_coef", "optim.lr", "batch.prompts", "batch.examples"),
    *("sampling.n", "sampling.max_new_tokens", "sampling.stop_token_ids", "model.lora.rank"),
    *("environment.name", "reward.name"),
    *("run.schedule", "run.seed"),
)
_HOW_TO_STOP: Final = (
    "No file of a model ends completions with a text: give them to `generate` of transformers as `stop_strings`, with "
    "the tokenizer as `tokenizer`, and to vLLM as `stop`."
)


def export_model(found: StoredModel, to: Path, *, merge: bool = False) -> None:
    """Write the model into the directory ``to``, with tokenizer, chat template and a model card.

    What transformers and vLLM load is written, or, where adapters were trained and ``merge`` is False, what peft loads.

    Raises:
        ConfigError: ``to`` holds other files, or only the merged model is there and ``merge`` is False. Or the model is
            copied, and the overrides of ``found`` have no effect.
        CheckpointError: The checkpoint is damaged, or the directory cannot be written.
    """
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise ConfigError(f"{to} is there already and is not empty: choose an empty or a new directory")
    _refuse_for_copy(found)
    files = RunFiles(check_path(to, "the directory of a model").parent)
    files.make_folder()
    aside = files.renew_folder(temporary := f".{to.name}.tmp")
    try:
        if found.checkpoint is not None:
            _write_checkpoint(found, aside, merge=merge)
        elif found.adapted and not merge:
            raise ConfigError(f"{found.run} has no checkpoint with its adapters: --merge exports the merged model")
        else:
            _copy_model(RunFiles(found.run, "model"), aside)
        _write_ends(files, temporary, found.stops)
        (aside / _CARD).write_text(_card(found, adapters=found.adapted and not merge), encoding="utf-8")
        files.rename(temporary, to.name)
    except Exception as error:
        from podium.models.manifest import refusal_of

        if not (reason := refusal_of(error)):
            raise
        raise CheckpointError(f"cannot write {to / _find_unwritten(error, aside)}: {reason}") from error
    finally:
        files.remove(temporary)


def _refuse_for_copy(found: StoredModel) -> None:
    """Refuse settings that replace those of the run, where files are copied and no model is made by settings."""
    typed = [key for key, _ in flatten(dict(parse_overrides(InferenceConfig, found.overrides)))]
    if not typed or (found.checkpoint is not None and not _is_model(files_of(found.checkpoint).check(_POLICY))):
        return
    origin = found.checkpoint or found.run / "model"
    raise ConfigError(
        f"--{typed[0]} has no effect: the model of {origin} is complete, and its files are copied as they are; leave "
        "it out. The library that loads the copy takes another dtype, and its chat_template.jinja is the template"
    )


def _find_unwritten(error: Exception, aside: Path) -> Path:
    """Return the file that a full disk refused, from the directory ``aside``. Not every error names it."""
    refused = getattr(error, "filename", None)
    if not refused:  # the last file that was begun
        files = [path for path in aside.rglob("*") if path.is_file()]
        refused = max(files, key=lambda path: path.stat().st_mtime_ns, default=aside)
    path = Path(refused)
    return path.relative_to(aside) if path.is_relative_to(aside) else path


@contextmanager
def open_model(found: StoredModel) -> Iterator[Path]:
    """Give a directory that holds the whole model during the block: the checkpoint's own, or a merged one beside the
    run where adapters were trained.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    run = RunFiles(found.run)
    if found.checkpoint is None:
        yield run.check("model")
        return
    policy = files_of(found.checkpoint).check(_POLICY)
    if _is_model(policy):
        from podium.models.manifest import check_manifest

        check_manifest(policy)
        yield policy
        return
    folder = run.renew_folder(name := f".model-{os.getpid()}.tmp")  # other nodes see it there too
    try:
        _write_checkpoint(found, folder / "model", merge=True)
        yield folder / "model"
    finally:
        run.remove(name)


def _is_model(policy: Path) -> bool:
    """Whether transformers can load the directory of a checkpoint's policy as it is."""
    return (policy / "config.json").is_file()


def _copy_model(files: RunFiles, to: Path) -> None:
    """Copy the files that a model has, by their names. A line says what else is there."""
    others: list[str] = []
    for name in files.walk():
        if not _MODEL_FILES.fullmatch(name):
            others += [name] if name.partition("/")[0] not in _OF_RESUME else []
            continue
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        with files.open(name) as source, (to / name).open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    if others:
        _logger.warning("%s: not copied, since a model has no such files: %s", files.path, ", ".join(others))


def _write_checkpoint(found: StoredModel, to: Path, *, merge: bool) -> None:
    from transformers.utils.hub import CHAT_TEMPLATE_FILE

    from podium.models.manifest import check_manifest
    from podium.models.tokenizers import load_tokenizer
    from podium.rollout.tasks.templates import chat_template
    from podium_inference.stored_policy import load_stored, write_adapters, write_whole

    assert found.checkpoint is not None
    policy = files_of(found.checkpoint).check(_POLICY)
    if _is_model(policy):
        check_manifest(policy)
        _copy_model(files_of(found.checkpoint).folder(_POLICY), to)
        return
    config: ModelConfig = found.config.model
    model = load_stored(policy, config)  # which checks that the base model of the adapters is unchanged
    (write_adapters if found.adapted and not merge else write_whole)(model, config, to)
    template = chat_template(load_tokenizer(config.tokenizer_source), found.config.data)
    if template is not None:
        (to / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")


def _write_ends(files: RunFiles, folder: str, stops: Sequence[int | str] = ()) -> None:
    """Let other libraries end a completion as the run did: with the chat template's end of a turn, or with the tokens
    of ``stops`` alone if there are any. Its texts cannot be written: a model whose generation_config.json has some
    needs a tokenizer in each call of ``generate``."""
    from transformers.utils import GENERATION_CONFIG_NAME

    from podium.models.tokenizers import load_tokenizer
    from podium.models.vocabulary import resolve_stops, write_ends
    from podium.rollout.tasks import end_of_turn
    from podium.rollout.tasks.config import DataConfig

    if not files.is_file(folder, GENERATION_CONFIG_NAME):  # of adapters and of reward models
        return
    tokenizer: Any = load_tokenizer(str(files.path / folder))
    settings, numbers = files.read(folder, GENERATION_CONFIG_NAME), resolve_stops(stops, tokenizer)[0]
    end: int | None = None
    if not numbers:
        with suppress(ConfigError):  # a template that the run did not use may be none that works
            end = end_of_turn(tokenizer, DataConfig())
    ends = numbers or (tokenizer.eos_token_id, end)
    files.write(write_ends(settings, ends, alone=bool(numbers)), folder, GENERATION_CONFIG_NAME)


def _card(found: StoredModel, *, adapters: bool) -> str:
    """Return the text of the model card, from the run's own figures."""
    values, settings = found.read_values(found.config_names[-1]), _read_settings(found, found.config_names[-1])
    origins = values if found.adapted else found.read_values(found.config_names[0])  # a resume has the weights already
    base = dict(flatten(mask(as_given(origins, found.run)))).get("model.path", "")
    judge, first, last, step = _figures(found)
    kind = find_recipe(recipe_of(values)).pipeline
    head = [f"library_name: {'peft' if adapters else 'transformers'}", f"pipeline_tag: {kind}"]
    stored = Path(origins.get("model", {}).get("path", "")).expanduser()
    if base and not stored.is_absolute() and not stored.exists():  # the hub knows no directories
        head.append(f"base_model: {json.dumps(base)}")
    origin = f"`{base}`" if base else "random weights"
    what = "Adapters (LoRA) of" if adapters else "A model that began as"
    what = "A reward model that began as" if kind == "text-classification" else what
    lines = ["---", *head, "tags: [podium]", "---", "", f"# {found.run.absolute().name}", ""]
    lines.append(f"{what} {origin}, trained by Podium for {write_count(step, 'step')}.")
    if last is not None:
        lines += ["", *_results(judge, first, last)]
    lines += ["", "| setting | value |", "|---|---|"]
    lines += [f"| `{key}` | `{_escape(value)}` |" for key, value in settings.items()]
    lines += _list_changes(found, settings)
    if texts := [stop for stop in found.stops if isinstance(stop, str)]:
        listing = ", ".join(f"`{json.dumps(text, ensure_ascii=False)}`" for text in texts)
        lines += ["", f"Completions of the run ended with these texts, too: {listing}. {_HOW_TO_STOP}"]
    return "\n".join(lines) + "\n"


def _read_settings(found: StoredModel, name: str) -> dict[str, Any]:
    """Return what the card tells of the settings in the file ``name`` of the run, by their keys."""
    values = found.read_values(name)
    texts = read_objects(RunFiles(found.run).read_small(name).decode(errors="replace"))
    objects = {f"script.{role}": visible(text) for role, text in texts.items()}
    settings = dict(flatten(mask(as_given(values, found.run)))) | objects
    settings["data.train"] = name_data(settings)
    keys = ("data.train", *_TOLD, *objects)
    return {key: settings[key] for key in keys if settings.get(key) not in (None, "", [])}


def _list_changes(found: StoredModel, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of the card on the settings that the run had before a resume, if they are other than ``settings``."""
    if found.state is not None and found.state.configs is None and len(found.config_names) > 1:
        what = "The checkpoint does not say which of the run's settings were in force: the table has the latest ones."
        yield from ("", what)
        return
    steps: dict[int | None, int] = {}  # the last one that is known of each configuration
    for checkpoint in StoredCheckpoints(RunFiles(found.run, "checkpoints")).all():
        with suppress(CheckpointError):
            state = TrainerState.read(checkpoint)
            steps[state.configs] = state.step
    lines: list[str] = []
    for number, name in enumerate(found.config_names[:-1]):
        when = f"Still at step {steps[number]}" if number in steps else "At steps of which no checkpoint is left"
        try:
            before = _read_settings(found, name)
        except (OSError, DataError, ConfigError):
            lines.append(f"- {when}: not known, because {name} of the run is missing or cannot be read")
            continue
        others = {key: before.get(key) for key in {**settings, **before} if before.get(key) != settings.get(key)}
        texts = [
            f"`{key}` not set" if value is None else f"`{key}` = `{_escape(value)}`" for key, value in others.items()
        ]
        lines += [f"- {when} ({name}): {', '.join(texts)}"] if texts else []
    if lines:
        what = "The run was resumed with other settings before it wrote this model. Earlier it had:"
        yield from ("", what, "", *lines)


def _escape(value: object) -> str:
    """The text of a setting in a table of Markdown, where | ends a cell."""
    return str(value).replace("|", "\\|")


def _results(judge: Metric, first: Evaluation | None, last: Evaluation) -> Iterator[str]:
    """A table of the held-out figures before and after training, the one that judges the run first, and its gain."""
    names = sorted(last.figures, key=lambda name: name != judge.name)
    titles = " | ".join(Metric(name).title for name in names[1:])
    yield f"| held-out | {judge.title} | 95 % interval | {titles} |"
    yield "|---|---|---|" + "---|" * len(names[1:])
    evaluations = {f"after step {last.step}": last}
    if first is not None and first.step == 0:
        evaluations = {"before training": first, **evaluations}
    for name, evaluation in evaluations.items():
        bounds = evaluation.interval(judge.name)
        interval = "" if bounds is None else " to ".join(map(judge.write, bounds))
        figures = " | ".join(Metric(figure).write(evaluation.value(figure)) for figure in names[1:])
        value = f"{judge.write(evaluation.value(judge.name))} of {evaluation.count(judge.name)}"
        yield f"| {name} | {value} | {interval} | {figures} |"
    if len(evaluations) == 2 and first is not last and first is not None:
        found = gain(first, last, judge.name)
        chance = ", which may be chance" * found.may_be_chance
        yield ""
        yield f"The {judge.title} changed by {judge.write_change(found.value)}{chance}."


def _figures(found: StoredModel) -> tuple[Metric, Evaluation | None, Evaluation | None, int]:
    """The metric that judges the run, its first evaluation, the last one, and the step of the model."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        checkpoint = StoredCheckpoints(RunFiles(found.run, "checkpoints")).latest()
    state = TrainerState.read(checkpoint) if checkpoint is not None else TrainerState()
    step = found.step
    first, last = (state.first, state.last) if step == state.step else (None, None)
    return state.judge, first, last, step
