"""The checkpoints of a run: its workers write them, and a resumed run loads one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from podium.errors import CheckpointError, EndpointError, PodiumError
from podium.exceptions import name_class, read_text
from podium.models.manifest import check_manifest, explain, file_sums, refusal_of, write_manifest
from podium.models.tokenizers import explain_other_encoding
from podium.models.vocabulary import write_ends
from podium.runs.checkpoint_folders import Checkpoints, TrainerState, files_of
from podium.runs.files import STATE_FILE
from podium.runs.run_files import RunFiles
from podium.runs.run_json import write_json
from podium.runs.sections import SaveConfig
from podium.telemetry import Note, emit
from podium.trainer.schedules.steps import name_stage

if TYPE_CHECKING:
    from podium.runtime import Call, Handle
    from podium.trainer.roles import Roles
    from podium.workers import Policy


def load_checkpoint(path: Path, roles: Roles) -> TrainerState:
    """Restore the roles from the checkpoint at ``path``, and return the controller's own state.

    Raises:
        CheckpointError: The checkpoint is damaged, does not fit the roles, or belongs to another kind of run.
    """
    files = files_of(path)
    files.check()
    check_manifest(path, others=[name for name in files.names() if files.is_folder(name)])
    state = TrainerState.read(path)
    if files.is_folder("reference") and "reference" not in roles.stored:
        raise CheckpointError(
            f"{path} holds a reference that was refreshed, and this configuration does not store one: keep "
            "algorithm.options.reference_refresh"
        )
    for name, worker in roles.stored.items():
        if not files.is_folder(name):
            raise CheckpointError(f"{path} holds no {name}, and this configuration has one")
        worker.load(str(path.absolute() / name))
    return state


@dataclass(frozen=True)
class ModelExtras:
    """What a model was trained with beside its weights, configuration and tokenizer.

    Attributes:
        template: The chat template if it is not the tokenizer's own.
        ends: The tokens with which the model has learned to end, and those that ended completions of the run.
        ends_alone: Whether ``ends`` replaced those of the model in the run.
    """

    template: str | None = None
    ends: Sequence[int | None] = ()
    ends_alone: bool = False

    def add_to(self, files: RunFiles, folder: str) -> list[str]:
        """Write them into the folder of a model, so that other libraries use them. Returns the names of the files."""
        names: list[str] = []
        if self.template is not None:
            files.write(self.template, folder, CHAT_TEMPLATE_FILE)
            names.append(CHAT_TEMPLATE_FILE)
        if files.is_file(folder, GENERATION_CONFIG_NAME):
            settings = files.read(folder, GENERATION_CONFIG_NAME)
            files.write(write_ends(settings, self.ends, alone=self.ends_alone), folder, GENERATION_CONFIG_NAME)
            names.append(GENERATION_CONFIG_NAME)
        return names


def write_model(files: RunFiles, policy: Handle[Policy], extras: ModelExtras) -> Path:
    """Write the policy's model with ``extras`` into the folder ``model``, and note if others read its tokenizer
    otherwise."""
    policy.save_pretrained(str(files.renew_folder(aside := ".model.tmp")))
    extras.add_to(files, aside)
    files.remove("model")
    files.rename(aside, "model")
    if others := explain_other_encoding(str(files.path / "model")):
        emit(Note(others))
    return files.path / "model"


class Saver:
    """Writes the checkpoints of one run.

    Args:
        checkpoints: The directory of the checkpoints.
        config: Which checkpoints are kept.
        extras: What the policy's directory has beside its state.
        beside: Whether checkpoints are written while the next steps run; otherwise a save returns when the checkpoint
            is complete.

    Attributes:
        took_s: How long the latest checkpoint took, from the request until it was written; 0 before the first one.
    """

    def __init__(
        self, checkpoints: Checkpoints, config: SaveConfig, extras: ModelExtras = ModelExtras(), *, beside: bool
    ) -> None:
        self.extras = extras
        self._checkpoints, self._config, self._beside = checkpoints, config, beside
        self.took_s = 0.0
        self._thread = ThreadPoolExecutor(1, "save")
        self._writing: Future[None] | None = None

    def save(self, state: TrainerState, roles: Roles) -> None:
        """Wait for the previous checkpoint. Then copy the learners' state, and begin to write it with ``state``.

        Raises:
            CheckpointError: The previous checkpoint could not be written; or this one could not, if saves wait.
        """
        self.wait()
        began_s = time.monotonic()
        content = write_json(asdict(state), indent=1)
        with self._telling(state.step):
            folder = self._checkpoints.files.make_folder()  # a later start removes what a killed worker has left there
            for copied in [worker.copy_state.submit(str(folder)) for worker in roles.stored.values()]:
                copied.result()
        if self._beside:
            self._writing = self._thread.submit(self._write, state.step, content, roles, began_s)
        else:
            self._write(state.step, content, roles, began_s)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one. This does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: The checkpoint cannot be written. The previous one is still the latest.
            PodiumError: A worker that wrote the checkpoint was lost, or passed its deadline.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Do :meth:`wait`. Then remove the checkpoints that are beyond those to keep: a process that was killed after
        its last save may have left them."""
        self.wait()
        self._checkpoints.prune(self._config.keep, self._config.keep_best)

    def close(self) -> None:
        """End the thread. The workers are closed before, so that the thread waits for nothing."""
        self._thread.shutdown()

    def _write(self, step: int, content: bytes, roles: Roles, began_s: float) -> None:
        config = self._config
        with (
            self._telling(step),
            name_stage("save", step),
            self._checkpoints.writing(step, keep=config.keep, keep_best=config.keep_best) as path,
        ):
            folder = self._checkpoints.files.folder(path.name)
            _write_learners(folder, roles, self.extras)
            folder.write(content, STATE_FILE)
            write_manifest(folder.absolute, [file_sums([folder.absolute / STATE_FILE])])
        self.took_s = time.monotonic() - began_s

    @contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """Raise an error of the block as one that also names the checkpoint to resume from."""
        try:
            yield
        except (OSError, CheckpointError, EndpointError) as error:
            cause = error.__cause__ if isinstance(error, EndpointError) and error.__cause__ is not None else error
            reason = _explain_failure(cause, self._checkpoints.folder)
            run, latest = self._checkpoints.folder.parent, self._checkpoints.latest()
            raise CheckpointError(
                f"the checkpoint of step {step} is not written: {reason}. "
                + (f"{latest} is complete: resume with --resume {run}" if latest else f"{run} has no checkpoint yet")
            ) from error


def _explain_failure(error: BaseException, folder: Path) -> str:
    """Say why a checkpoint in ``folder`` could not be written, and the remedy if it is known."""
    refusal = refusal_of(error)  # a full disk, of which libraries tell by errors of their own kinds
    if isinstance(error, PodiumError):  # which names its file
        text, remedy = read_text(error), refusal.partition("; ")[2]
        return text if remedy in text else f"{text}; {remedy}"
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {refusal or explain(error)}"
    if refusal:
        return f"{folder}: {refusal}"
    return f"{name_class(error)}: {read_text(error)}"


def _write_learners(folder: RunFiles, roles: Roles, extras: ModelExtras) -> None:
    """Have all learners write what they copied into ``folder``. All have ended when this returns or raises."""
    calls: dict[str, Call[list[dict[str, Any]]]] = {}
    failed: PodiumError | None = None
    for name, worker in roles.stored.items():
        try:
            calls[name] = worker.write_state.submit(str(folder.absolute / name))
        except PodiumError as error:
            failed = failed or error
    for name, call in calls.items():
        try:
            sums = call.result()
            if roles.stored[name] is roles.policy:
                sums = [*sums, file_sums(folder.absolute / name / file for file in extras.add_to(folder, name))]
            write_manifest(folder.absolute / name, sums)
        except PodiumError as error:
            failed = failed or error
    if failed is not None:
        raise failed
