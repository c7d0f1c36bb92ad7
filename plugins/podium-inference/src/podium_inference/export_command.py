"""``podium export RUN --to DIR`` writes the model of a run, or of a checkpoint, for other libraries."""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from podium.cli.connecting import check_options
from podium.config import parse_overrides
from podium.errors import ConfigError, PodiumError
from podium.runs.config import InferenceConfig
from podium.telemetry.formatting import visible

__all__ = ["run_export"]


def run_export(arguments: Sequence[str]) -> int:
    """Write the model, and push it to the hub if asked to. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium export",
        usage="podium export RUN[@STEP|@best] --to DIR [--merge] [--push NAME] [--SECTION.KEY VALUE ...]",
        description="Write a model of a run as transformers, vLLM and peft load it, with tokenizer and model card.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="RUN",
        help="a run (its final model), RUN@STEP, RUN@best (by eval.metric), RUN@latest, or a checkpoint's folder",
    )
    parser.add_argument("--to", metavar="DIR", help="write it into this directory, which must be empty or new")
    parser.add_argument("--merge", action="store_true", help="merge adapters into the weights of their base model")
    parser.add_argument("--push", metavar="NAME", help="upload it to this repository of the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="create the repository of --push as a private one")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options, overrides = parser.parse_known_args(arguments)
    check_options(parser, arguments, overrides)
    _check_settings(overrides)
    if not (options.to or options.push):
        raise ConfigError("say where the model goes: --to DIR, --push NAME, or both")
    if options.push:
        _check_name(options.push)
    from podium.models.tokenizers import explain_other_encoding
    from podium.runs.stored_models import find_model
    from podium_inference.export import export_model

    source = find_model(options.model)
    if source is not None and source.checkpoint is None and source.adapted and not options.merge:
        source = find_model(options.model, final=False)  # the final model is merged, the checkpoint is not
    if source is None:
        raise ConfigError(
            f"no run and no checkpoint at {options.model}: give the directory of a run, such as runs/NAME"
        )
    source = dataclasses.replace(source, overrides=overrides)
    source.check()
    for remark in source.remarks():
        sys.stderr.write(f"{visible(remark)}\n")
    with contextlib.ExitStack() as stack:
        folder = options.to or str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        export_model(source, Path(folder), merge=options.merge)
        if others := explain_other_encoding(folder):
            sys.stderr.write(f"{visible(others)}\n")
        kind = "adapters" if source.adapted and not options.merge else "model"
        origin = source.checkpoint or source.run / "model"
        if options.to:
            sys.stdout.write(f"{kind} of {origin} written to {folder}\n")
        if options.push:
            sys.stdout.write(f"{kind} of {origin} pushed to {_push(folder, options.push, private=options.private)}\n")
    return 0


def _check_settings(overrides: Sequence[str]) -> None:
    """Refuse settings that no model is written with, which would have no effect. Raises ConfigError."""
    from podium.runs.named_files import is_needed
    from podium.runs.run_reader import flatten
    from podium.runs.stored_models import MAKES_MODEL

    for key, _ in flatten(dict(parse_overrides(InferenceConfig, overrides))):
        if not is_needed(key, MAKES_MODEL):
            raise ConfigError(f"--{key} is no setting of podium export, which reads model.* and data.chat_template")


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name}: {error}") from None


def _push(folder: str, name: str, *, private: bool) -> str:
    """Upload the files in ``folder``. Returns the repository's address.

    Raises:
        ConfigError: The repository was there before, and everybody can read it although ``private`` is True.
        PodiumError: The hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(repository.repo_id).private:
            raise ConfigError(
                f"--push {name}: the repository exists already and is public: make it private in its settings, or "
                "choose another name"
            )
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload from podium export")
    except ConfigError:
        raise
    except Exception as error:  # errors of the hub, of the HTTP library that huggingface_hub uses, and of its uploads
        reasons = dict.fromkeys(" ".join(str(cause).split()) for cause in (error, error.__cause__) if cause is not None)
        raise PodiumError(
            f"--push {name}: {' '.join(reasons)}; check the connection, the name and your rights there (`hf auth "
            "login`), and push again: files that were uploaded are not uploaded twice"
        ) from error
    return str(repository)
