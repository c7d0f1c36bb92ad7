"""The model of a checkpoint in the files that transformers and peft load, written by all ranks and read by each.

    copy    all ranks gather each tensor ─▶ one of them copies it to host memory ─▶ train on
    write   a thread of each rank          model-00001-of-00004.safetensors …
            rank 0                         config.json, tokenizer, model.safetensors.index.json
    read    each rank                      the rows of its own shards

The files hold the tensors by the names and in the parts that transformers writes. A mixture of experts has one tensor
for all experts in memory, and one for each expert in the files. The bytes are the same, so that what is read is what
was written, to the last bit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from podium.data.gathering import gather_rows
from podium.errors import CheckpointError, ConfigError
from podium.models.adapters import name_base
from podium.models.config import ModelConfig
from podium.models.layout import ModelLayout, Stored
from podium.models.loading import plain_model, save_pretrained
from podium.models.manifest import file_sums
from podium.models.other_parts import NO_OTHERS, OtherParts
from podium.models.safetensors_writer import Part, write_safetensors
from podium.models.tensor_files import Place, Source, places, read_rows
from podium.models.tokenizers import load_tokenizer
from podium.models.value_head import is_of_value_head
from podium.models.weight_files import INDEX, WHOLE, read_stored_tensors
from podium.models.whole_weights import WholeWeights

_ADAPTERS: Final = "adapter_model.safetensors"
RESUME: Final = "resume"
"""The directory in a learner's checkpoint of what only a resumed run needs."""
_LAYOUT: Final = f"{RESUME}/model.json"


class ModelCopy:
    """What this rank writes of a model, in host memory. All ranks make theirs at the same time.

    Each tensor is written whole, by one rank. So the ranks together hold one copy. A tensor of which each rank has a
    shard is gathered by all, one at a time.

    Args:
        model: The model, or peft's wrapper of one, of which the adapters are copied.
        layout: That of the model; None for adapters.
        texts: The files beside the weights, of :func:`model_texts`, which rank 0 writes.
        rank: Place of this rank.
        ranks: The number of ranks.
        file_bytes: About as many bytes are in a file.
        others: What the files of the model held beside it. Rank 0 copies it from file to file.
        resumed: Whether :func:`read_model` is to read it again.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout | None,
        texts: Mapping[str, bytes],
        *,
        rank: int,
        ranks: int,
        file_bytes: int,
        others: OtherParts = NO_OTHERS,
        resumed: bool = True,
    ) -> None:
        self._tensors: dict[str, list[Part]] = {}
        self._texts = dict(texts) if rank == 0 else {}
        self._others: tuple[str, OtherParts] | None = None
        if layout is None:
            self._tensors |= _copy_adapters(model, rank)
            return
        weights = WholeWeights(plain_model(model))
        sizes = {info.name: torch.Size(info.shape).numel() * info.itemsize for info in weights.manifest}
        shares = _shares(sizes, ranks, file_bytes)
        count = len(shares) + bool(others.tensors)
        files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index: dict[str, str] = dict.fromkeys(others.tensors, files[-1])
        if rank == 0 and others.tensors:
            self._others = files[-1], others
        for file, (writer, names) in zip(files if count > 1 else [WHOLE], shares, strict=False):
            for name in names:
                tensor = weights.gather(name)
                if writer == rank:
                    copied = tensor.reshape(-1).to("cpu", copy=True).split([part.numel for part in layout[name]])
                    parts = [
                        Part(stored.name, part.view(stored.shape))
                        for stored, part in zip(layout[name], copied, strict=True)
                    ]
                    self._tensors.setdefault(file, []).extend(parts)
            index |= {part.name: file for name in names for part in layout[name]}
        if rank == 0 and count > 1:
            content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(index.items()))}
            self._texts[INDEX] = json.dumps(content, indent=2).encode()
        if rank == 0 and resumed:
            self._texts[_LAYOUT] = json.dumps(layout).encode()

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files into ``folder``, which exists, and let go of them.

        Returns:
            Their sizes and checksums, as of :func:`.file_sums`. The files are on the disk.

        Raises:
            OSError: The disk refuses.
        """
        sums: dict[str, Any] = {}
        for file in sorted(self._tensors):
            sums[file] = write_safetensors(folder / file, self._tensors.pop(file))
        if self._others is not None:
            file, others = self._others
            sums[file] = write_safetensors(folder / file, others.read())
        for file, content in self._texts.items():
            (folder / file).parent.mkdir(exist_ok=True)  # of further chat templates, for one
            (folder / file).write_bytes(content)
            sums[file] = file_sums([folder / file])[Path(file).name]
        return sums


def read_layout(folder: Path) -> ModelLayout | None:
    """Return the layout of the model in the checkpoint ``folder``; None where its weights are in ``resume`` or, as
    once, beside the rest.

    Raises:
        CheckpointError: It cannot be read.
    """
    if not (folder / _LAYOUT).exists():
        return None
    try:
        layout = cast("dict[str, list[Any]]", json.loads((folder / _LAYOUT).read_bytes()))
        return {
            name: [Stored(str(stored_name), [int(size) for size in shape]) for stored_name, shape in layout[name]]
            for name in layout
        }
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {_LAYOUT}: {error}") from error


def read_model(model: nn.Module, layout: ModelLayout, folder: Path) -> None:
    """Read what :class:`ModelCopy` wrote into ``model``, in place. Each rank reads its own shards.

    Raises:
        CheckpointError: The files are of another model, or of another data type.
    """
    weights = WholeWeights(plain_model(model))
    tensors = dict(zip((info.name for info in weights.manifest), weights.tensors, strict=True))
    stored = _read_stored_tensors(folder)
    wanted = {part.name for parts in layout.values() for part in parts}
    stored_names = stored.keys() & wanted  # the files may hold parts of the model that are not trained
    for mine, theirs in ((tensors.keys(), layout.keys()), (wanted, stored_names)):
        if mine != theirs:
            lacks, has = sorted(mine - theirs), sorted(theirs - mine)
            raise CheckpointError(
                f"the checkpoint {folder} is of another model: it lacks {lacks[:3]} and has {has[:3]}"
            )
    for name, tensor in tensors.items():
        count = sum(part.numel for part in layout[name])
        if count != tensor.numel():
            shapes = ", ".join(str(part.shape) for part in layout[name])
            raise CheckpointError(
                f"the checkpoint {folder} is of another model: it holds {name} as {shapes}, and this run as "
                f"{list(tensor.shape)}"
            )
        for part in layout[name]:
            location = stored[part.name]
            if location.shape != part.shape:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {part.name} is {location.shape} in its files"
                )
            if location.dtype != tensor.dtype:  # it would be rounded without a word
                raise CheckpointError(
                    f"the checkpoint {folder} holds {part.name} as {location.dtype}, and this run as {tensor.dtype}: "
                    "set model.dtype and optim.master_weights as they were when it was written"
                )
    with torch.no_grad():
        for name, tensor in tensors.items():
            read_rows(Source(list(tensor.shape), [stored[part.name] for part in layout[name]]), tensor)


def _read_stored_tensors(folder: Path) -> dict[str, Place]:
    try:
        files = {tensor.file for tensor in read_stored_tensors(str(folder)).values()}
        return {name: location for file in files for name, location in places(file).items()}
    except (OSError, ValueError, LookupError, ConfigError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error


def model_texts(
    model: nn.Module, config: ModelConfig, others: OtherParts = NO_OTHERS, within: str | None = None
) -> dict[str, bytes]:
    """Return the files of a model's directory beside its weights, by name: configurations and the tokenizer.

    They stay the same while the model is trained. transformers writes them to a directory, which is made in ``within``
    if that is there.
    """
    within = within if within is not None and Path(within).is_dir() else None
    with tempfile.TemporaryDirectory(prefix=".texts-", suffix=".tmp", dir=within) as made:
        if hasattr(model, "peft_config"):
            name_base(model, config).save_pretrained(made)
        else:
            save_pretrained(model, {}, made, None, others)
        if config.tokenizer_source:
            load_tokenizer(config.tokenizer_source).save_pretrained(made)
        return {
            str(path.relative_to(made)): path.read_bytes()
            for path in sorted(Path(made).rglob("*"))
            if path.is_file() and "safetensors" not in path.name
        }


def _copy_adapters(model: nn.Module, rank: int) -> dict[str, list[Part]]:
    """Return the file of the adapters, which rank 0 writes whole."""
    from peft import get_peft_model_state_dict

    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_of_value_head(name):
            value = gather_rows(parameter.detach())
            if rank == 0:
                tensors[name] = value.to("cpu", copy=True)
    if rank:
        return {}
    named = get_peft_model_state_dict(cast(Any, model), tensors, save_embedding_layers=False)
    return {_ADAPTERS: [Part(name, values) for name, values in cast("dict[str, Tensor]", named).items()]}


def _shares(sizes: Mapping[str, int], ranks: int, file_bytes: int) -> list[tuple[int, list[str]]]:
    """Cut the tensors into files. Returns for each the rank that writes it, and its tensors' names."""
    total, before = max(1, sum(sizes.values())), 0
    shares: list[tuple[int, list[str]]] = []
    nbytes_in_file = 0
    for name, size in sizes.items():
        writer = min(ranks - 1, before * ranks // total)
        if not shares or shares[-1][0] != writer or nbytes_in_file >= file_bytes:
            shares.append((writer, []))
            nbytes_in_file = 0
        shares[-1][1].append(name)
        nbytes_in_file += size
        before += size
    return shares
