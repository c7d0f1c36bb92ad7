"""The base of the workers that are trained: a model, its optimizer, and checkpoints of both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from podium.algorithms import AlgorithmConfig, check_functions, loss_weights
from podium.algorithms.metrics import TokenMean
from podium.algorithms.records import is_own_column
from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import count_sampled
from podium.devices import choose_device, random_state, set_random_state, total_memory_bytes
from podium.errors import CheckpointError
from podium.models.adapters import BASE, base_checksum, check_scale
from podium.models.config import ModelConfig
from podium.models.layout import ModelLayout, model_layout
from podium.models.loading import plain_model
from podium.models.manifest import check_manifest, explain, write_manifest
from podium.models.model_files import RESUME, ModelCopy, model_texts, read_layout, read_model
from podium.models.other_parts import OtherParts
from podium.models.other_parts_search import find_other_parts, freeze_other_parts
from podium.models.value_head import is_of_value_head
from podium.runtime import Worker, endpoint, first, nothing
from podium.spelling import write_count
from podium.training.config import OptimConfig, ParallelConfig, check_dropout
from podium.training.sharded_loading import load_parallel
from podium.training.state_copy import StateCopy
from podium.training.train_engine import TrainEngine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

LEFT_OUT = "left_out"
"""Column bool ``[B]``: rows without a part in the loss and in its normalization."""

_COUNT = "counted"  # metadata of a batch: the number of tokens or rows over which its metrics are means
_MODEL, _RANDOM, _LOSS_SCALE, _SCHEDULE = "model.", "random.", "loss_scale", "schedule"
_OPTIONAL = (_RANDOM, _LOSS_SCALE, _SCHEDULE)  # a rank or a precision of another run may be new
_FILE_BYTES = 1 << 30  # a copy is let go of file by file


def list_own_columns(batch: Batch) -> list[str]:
    """Return the token columns of ``batch`` that are not Podium's, which a loss finds in ``inputs.columns``."""
    lengths = batch.jagged(fields.TOKENS).lengths
    named = {name: batch[name] for name in batch if is_own_column(name)}
    return [
        name for name, column in named.items() if isinstance(column, Jagged) and torch.equal(column.lengths, lengths)
    ]


class Progress(NamedTuple):
    """The optimizer steps so far, those of them that were skipped, and a parameter that is not finite ("" if none)."""

    steps: int
    skipped: int
    not_finite: str


class Learner(Worker):
    """A model, its optimizer, and its checkpoints on all ranks of the group.

    A checkpoint is the directory of a model, as transformers loads it, or as peft loads adapters. Its directory
    ``resume`` has what training needs beside the model: optimizer state, step counts and each rank's random state, and
    of adapters a checksum of their base. All are safetensors files, with a manifest of their checksums. Reading them
    runs no code from the checkpoint. A checkpoint can be read on a different number of ranks, replicated or sharded.

    Args:
        model: The model to train.
        optim: The optimizer. None makes a worker that only evaluates.
        parallel: How model and batches are spread over ranks.
        algorithm: The loss and its constants.

    Raises:
        ConfigError: The loss cannot be found, an option is wrong, or see :func:`.check_dropout`.
    """

    head_optim: OptimConfig | None = None
    """The optimizer of a value head, if not that of the model."""
    late_steps: int = 0
    """Steps of a run before the first in which this worker makes optimizer steps."""
    is_causal: bool = True
    """Whether the model must not read ahead, because something is computed for each token from those before it."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
    ) -> None:
        self.config = model
        self.parallel = parallel or ParallelConfig()
        check_functions(algorithm or AlgorithmConfig())
        self.algorithm = (algorithm or AlgorithmConfig()).resolve()
        check_dropout(model, self.algorithm)
        self.device = choose_device(self.ctx.devices)
        made = self.make_model()
        freeze_other_parts(made)
        self.engine = TrainEngine(
            made,
            head_optim=self.head_optim,
            optim=optim,
            parallel=self.parallel,
            device=self.device,
            world_size=self.ctx.world_size,
            dropout=not self.algorithm.reinforces if model.dropout is None else model.dropout,
            causal=self.is_causal,
        )
        torch.manual_seed(self.ctx.seed)  # dropout draws from what torch seeds by chance
        self._copied: tuple[StateCopy, ModelCopy | None] | None = None
        self._texts: Mapping[str, bytes] | None = None
        self._base: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The model that is trained, in place, on its device."""
        self.engine.wake()
        return self.engine.model

    def make_model(self) -> nn.Module:
        """Make the model to train, on ``self.device``. A subclass may make another.

        The model may be sharded by ``self.parallel`` already. All ranks make it together.
        """
        return load_parallel(self.config, self.parallel, self.device)

    @endpoint()
    def progress(self) -> Progress:
        """Return each rank's count of steps, and whether its parameters are finite."""
        with self.engine.awake():
            trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            wrong = next((name for name, parameter in trained if not _is_finite(parameter)), "")
        return Progress(self.engine.step_count, self.engine.skipped_count, wrong)

    @endpoint(collect=first())
    def note(self) -> str:
        """Return what the run says of this worker, one sentence a line: why rows share a forward pass in another way
        than ``parallel.batching`` prefers, which parts of the model cannot be saved again, settings without an effect,
        an auxiliary loss of routers that is not trained, and the size of micro-batches that Podium has chosen for an
        accelerator."""
        name = type(plain_model(self.engine.model)).__name__
        unused = sized = ""
        if self.config.dropout and not _is_noisy(self.engine.model):
            unused = f"model.dropout = true has no effect: the configuration of {name} has no rate of dropout above 0"
        if self.parallel.micro_batch_tokens is None and self.engine.optim and total_memory_bytes(self.device):
            size = self.engine.micro_batch_tokens
            sized = f"parallel.micro_batch_tokens = {size} for the {self.ctx.role or name}, by the memory of its device"
        return "\n".join(filter(None, (self.engine.note, self.others.lost, unused, self._note_routers(), sized)))

    def _note_routers(self) -> str:
        """Say that the auxiliary loss is not trained which the model's configuration asks for; "" if it is, or does
        not."""
        settings: Any = plain_model(self.engine.model).config.get_text_config()
        asks = self.engine.optim is not None and getattr(settings, "output_router_logits", False) is True
        if not asks or self.algorithm.router_balance:
            return ""
        return (
            "output_router_logits = true in the model's configuration adds no auxiliary loss of its routers here, "
            "unlike in other libraries: algorithm.options.router_balance does, in reinforcement learning alone"
        )

    @endpoint(collect=nothing())
    def rest(self, weights: bool = True) -> None:
        """Move the parts that ``parallel.offload`` names off the device until they are needed. ``weights=False`` keeps
        the weights.
        """
        self.engine.rest(weights=weights)

    @endpoint(collect=nothing())
    def copy_state(self, within: str | None = None) -> None:
        """Copy the state to host memory, for :meth:`write_state`. The ranks together hold one copy of it.

        Args:
            within: A directory for temporary files, named ``.*.tmp``, which a worker that is killed leaves there.
                Default, also if the directory does not exist: the system's.

        Raises:
            CheckpointError: Gradients wait for an optimizer step, and no checkpoint keeps them.
        """
        if waiting := self.engine.waiting_count:
            raise CheckpointError(
                f"the gradients of {write_count(waiting, 'minibatch')} wait for an optimizer step, and a "
                "checkpoint does not keep them: call step() before"
            )
        with self.engine.awake():
            rank, ranks, gather = self.ctx.rank, self.ctx.world_size, self.engine.parallel.gather_objects
            state, layout = self._state(), self._layout
            adapted = self.config.lora is not None and not self.config.config
            model: ModelCopy | None = None
            if layout is not None or adapted:
                texts = self._model_texts(within)
                model = ModelCopy(
                    self.model, layout, texts, rank=rank, ranks=ranks, file_bytes=_FILE_BYTES, others=self.others
                )
            if layout is not None:
                state = {name: value for name, value in state.items() if not _is_of_model(name)}
            self._copied = StateCopy(state, self._files(state), rank, gather), model

    @endpoint(concurrent=True)
    def write_state(self, path: str) -> dict[str, Any]:
        """Write what :meth:`copy_state` copied into the directory ``path``, while later calls change the state.

        Returns:
            Each rank's :func:`.file_sums`, for :func:`.write_manifest`, which completes the checkpoint.

        Raises:
            CheckpointError: The disk refuses, or nothing was copied.
        """
        copied, self._copied = self._copied, None
        if copied is None:
            raise CheckpointError(f"nothing was copied for {path}: call copy_state before each write_state")
        state, model = copied
        folder = Path(path)
        try:
            (folder / RESUME).mkdir(parents=True, exist_ok=True)
            sums = {} if model is None else model.write(folder)
            return sums | {f"{RESUME}/{name}": entry for name, entry in state.write(folder / RESUME).items()}
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explain(error)}") from error

    @endpoint(collect=nothing())
    def save(self, path: str) -> None:
        """Write a checkpoint to resume from into the directory ``path``, and wait for its end.

        Raises:
            CheckpointError: The directory cannot be written, or ranks have different directories of this name.
        """
        self.copy_state()
        parts = self.engine.parallel.gather_objects(self.write_state(path))
        if self.ctx.rank == 0:
            write_manifest(Path(path), parts)

    @endpoint(collect=nothing())
    def load(self, path: str) -> None:
        """Read what :meth:`save` wrote. A rank that did not exist then keeps its random state.

        Raises:
            CheckpointError: The checkpoint is missing, unfinished or damaged, or belongs to another model or to
                adapters of another base or another alpha.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        folder = Path(path)
        check_manifest(folder, part=self.ctx.rank, parts=self.ctx.world_size)
        check_scale(folder, self.config)
        layout = read_layout(folder)
        reader = HuggingFaceStorageReader(str(folder / RESUME if (folder / RESUME).is_dir() else folder))
        try:
            stored = cast(Mapping[str, Any], reader.read_metadata().state_dict_metadata)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the checkpoint {path}: {type(error).__name__}: {error}") from error
        with self.engine.awake():
            if layout is not None:
                read_model(self.model, layout, folder)
            self._read(path, reader, stored, weights=layout is None)

    def _read(self, path: str, reader: HuggingFaceStorageReader, stored: Mapping[str, Any], *, weights: bool) -> None:
        """Read what ``reader`` has, of which ``stored`` says the shapes; ``weights``: the model is among it."""
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.api import CheckpointException

        state = self._state(whole=BASE not in stored)  # checkpoints of adapters once held the base too
        state = {name: value for name, value in state.items() if weights or not _is_of_model(name)}
        absent = sorted(name for name in state if name not in stored and not name.startswith(_OPTIONAL))
        extra = sorted(name for name in stored if name not in state and not name.startswith(_OPTIONAL))
        if absent or extra:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: it lacks {absent[:3]} and has {extra[:3]}"
            )
        wanted = {name: value for name, value in state.items() if name in stored}
        for name, value in wanted.items():
            if stored[name].size != value.shape:
                raise CheckpointError(
                    f"the checkpoint {path} is of another model: it holds {name} as {list(stored[name].size)}, and "
                    f"this run as {list(value.shape)}"
                )
            dtype = stored[name].properties.dtype
            if dtype != value.dtype:  # torch would round without a word
                raise CheckpointError(
                    f"the checkpoint {path} holds {name} as {dtype}, and this run as {value.dtype}: set model.dtype "
                    "and optim.master_weights as they were when it was written"
                )
        try:
            with _single_process_is_fine() as alone:
                state_dict_loader.load(wanted, storage_reader=reader, no_dist=alone)
        except (OSError, ValueError, SafetensorError, CheckpointException) as error:
            raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
        if self._base is not None and BASE in wanted and not torch.equal(wanted[BASE], self._base):
            raise CheckpointError(
                f"the checkpoint {path} holds adapters of another base than model.path={self.config.path!r} has now: "
                "give the run the model that it began with"
            )
        self._restore_counts(wanted)
        for name, device in self._random_names().items():
            if name in wanted:
                set_random_state(device, wanted[name])

    def _restore_counts(self, state: Mapping[str, Tensor]) -> None:
        self.engine.step_count, self.engine.skipped_count = (int(count) for count in state["counts"])
        self.engine.schedule_shift = self._place_schedule(*state[_SCHEDULE].tolist()) if _SCHEDULE in state else 0
        if _LOSS_SCALE in state:
            self.engine.loss_scale.restore(state[_LOSS_SCALE])

    def _place_schedule(self, shift: int, updates: int, late: int) -> int:
        """Return the ``schedule_shift`` of a run that goes on with these settings, where it had ``shift``, and made
        ``updates`` optimizer steps in each of its steps but the first ``late``."""
        count = self.engine.step_count
        position = count + shift
        if position and (updates, late) != (self.algorithm.updates, self.late_steps):
            steps = (position + late * updates) / updates
            position = max(0, round((steps - self.late_steps) * self.algorithm.updates))
        return position - count

    def weighted(self, batch: Batch) -> Batch:
        """Return ``batch`` with ``loss_weights``, computed over all ranks' rows where it has none.

        ``batch.meta["aggregation"]``, by default that of the worker's algorithm, says how.

        Rows of the column ``left_out`` lose their ``loss_mask``, so that they have no weight and do not count.
        ``batch.meta["max_new_tokens"]`` is the constant of the aggregation ``sequence-sum-constant``. With the column
        ``trajectory_tokens`` the rows of a trajectory count as one row, in whichever minibatches they are.

        Raises:
            ConfigError: see :func:`podium.algorithms.loss_weights`.
        """
        if LEFT_OUT in batch:
            mask = batch.jagged(fields.LOSS_MASK)
            counted_N = torch.repeat_interleave(~batch.dense(LEFT_OUT), mask.lengths)
            batch = batch.with_columns({fields.LOSS_MASK: mask.like(mask.values.bool() & counted_N)})
        if fields.LOSS_WEIGHTS in batch:
            return batch
        mask = batch.jagged(fields.LOSS_MASK)
        mode = batch.meta.get("aggregation", self.algorithm.aggregation_mode)
        counts = count_sampled(mask)
        trajectory_tokens = batch.dense(fields.TRAJECTORY_TOKENS) if fields.TRAJECTORY_TOKENS in batch else counts
        local_sums = torch.stack([counts.sum().double(), (counts.double() / trajectory_tokens.clamp(min=1)).sum()]).to(
            self.device
        )
        tokens, rows = self.engine.parallel.gather(local_sums).sum(0).to(mask.offsets.device)
        weights = loss_weights(
            mask.values.bool(),
            mask.offsets,
            mode,
            constant=batch.meta.get("max_new_tokens"),
            tokens=tokens,
            rows=rows,
            trajectory_tokens_B=trajectory_tokens,
        )
        count = float(rows if mode == "sequence-mean" else tokens)
        return batch.with_columns({fields.LOSS_WEIGHTS: mask.like(weights)}).with_meta(**{_COUNT: count})

    def count_means(self, batch: Batch, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a minibatch that :meth:`weighted` has weighted, so that those of several minibatches
        are joined as means over all of their tokens, or rows. Others have weights of their own, and count the same."""
        return TokenMean.over(batch.meta.get(_COUNT, 1.0), figures)

    def _state(self, *, whole: bool = False) -> dict[str, Tensor]:
        """Return the engine's own tensors by flat names, so that reading into them is loading.

        Args:
            whole: Whether the frozen base of adapters is there itself, and not by its checksum. All ranks call this
                together.
        """
        adapted = self.config.lora is not None and not whole
        named = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad or not adapted
        }
        state = {f"{_MODEL}{name}": parameter.detach() for name, parameter in named.items()}
        if self.engine.optimizer is not None:
            for name, parameter in named.items():
                for key, value in self.engine.optimizer.state.get(parameter, {}).items():
                    state[f"optimizer.{name}.{key}"] = value
        if adapted:
            if self._base is None:
                self._base = base_checksum(self.model)
            state[BASE] = self._base.clone()
        state["counts"] = torch.tensor([self.engine.step_count, self.engine.skipped_count])
        plan = self.engine.schedule_shift, self.algorithm.updates, self.late_steps
        state[_SCHEDULE] = torch.tensor(plan)
        if self.engine.loss_scale.is_used:
            state[_LOSS_SCALE] = self.engine.loss_scale.state
        return state | {name: random_state(device) for name, device in self._random_names().items()}

    @cached_property
    def others(self) -> OtherParts:
        """What the files of the model hold beside what is trained. Checkpoints and the saved model keep it."""
        return find_other_parts(self.engine.model, self.config)

    @cached_property
    def _layout(self) -> ModelLayout | None:
        """How the weights lie in a checkpoint's files of the model; None where they are among the rest."""
        return None if self.config.lora is not None else model_layout(self.model)

    def _model_texts(self, within: str | None) -> Mapping[str, bytes]:
        """Return the model's configurations and tokenizer as files, on the rank that writes them."""
        if self._texts is None:
            self._texts = model_texts(self.model, self.config, self.others, within) if self.ctx.rank == 0 else {}
        return self._texts

    def _random_names(self) -> dict[str, torch.device]:
        """Return this rank's generators of random numbers, by the names of their states."""
        devices = {"cpu": torch.device("cpu")} | ({} if self.device.type == "cpu" else {"device": self.device})
        return {f"{_RANDOM}{self.ctx.rank}.{kind}": device for kind, device in devices.items()}

    def _files(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of the file of each tensor, from 1. The tensors of a file have about ``_FILE_BYTES``."""
        kinds = [name.rpartition(".")[2] for name in self._random_names()]
        numbers = {f"{_RANDOM}{rank}.{kind}": 1 for rank in range(self.ctx.world_size) for kind in kinds}
        before = 0
        for name, value in state.items():
            numbers.setdefault(name, 1 + before // _FILE_BYTES)
            before += value.nbytes
        return numbers


def _is_of_model(name: str) -> bool:
    """Whether a tensor of the state is in the files of the model, as a value head is not."""
    return name.startswith(_MODEL) and not is_of_value_head(name)


def _is_noisy(model: nn.Module) -> bool:
    """Whether dropout or router noise acts in a model that trains, beside the dropout of adapters."""
    return any(
        isinstance(rate, int | float) and rate > 0 and (name == "p" or "drop" in name or "jitter" in name)
        for path, module in model.named_modules()
        if "lora_dropout" not in path
        for name, rate in vars(module).items()
    )


def _is_finite(parameter: Tensor) -> bool:
    local = (
        cast("Any", parameter).to_local() if hasattr(parameter, "to_local") else parameter
    )  # of a shard, this rank's
    return local.numel() == 0 or bool(torch.stack(torch.aminmax(local.detach())).isfinite().all())


@contextmanager
def _single_process_is_fine() -> Iterator[bool]:
    """Yield whether there is no process group, of which torch would warn although that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield not dist.is_initialized()
