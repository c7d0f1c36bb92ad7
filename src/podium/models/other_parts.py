"""The tensors of a model's files that are not trained. They are kept, and written beside the trained ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from podium.models.safetensors_writer import Part, write_safetensors
from podium.models.weight_files import INDEX, WHOLE, StoredTensor, read_stored_tensors

_TRAINED: Final = "model-trained.safetensors"
_OTHERS: Final = "model-other-parts.safetensors"


@dataclass(frozen=True)
class OtherParts:
    """The parts of a model's files that are not trained.

    Attributes:
        tensors: The tensors that transformers does not load, by name.
        texts: The files beside the weights, by name: those of image processors, and the configuration of the whole
            where transformers loads a part of it.
        lost: What cannot be kept, and why; "" if all is kept.
    """

    tensors: Mapping[str, StoredTensor]
    texts: Mapping[str, bytes]
    lost: str = ""

    def read(self) -> list[Part]:
        """Return the tensors as they are stored. Raises OSError."""
        parts: list[Part] = []
        try:
            for file in sorted({tensor.file for tensor in self.tensors.values()}):
                with safe_open(file, framework="pt") as stored:
                    names = (name for name, tensor in self.tensors.items() if tensor.file == file)
                    parts += [Part(name, stored.get_tensor(name)) for name in names]
        except SafetensorError as error:
            raise OSError(f"the files of model.path have changed: {error}") from error
        return parts

    def add_to(self, folder: Path) -> None:
        """Add the parts to ``folder``, into which transformers has written what was trained. Raises OSError."""
        for name, content in self.texts.items():
            (folder / name).write_bytes(content)
        if not self.tensors or (not (folder / INDEX).exists() and not (folder / WHOLE).exists()):
            return
        index = folder / INDEX
        if index.exists():
            content = json.loads(index.read_bytes())
        else:
            names = read_stored_tensors(str(folder))
            (folder / WHOLE).rename(folder / _TRAINED)
            nbytes = (folder / _TRAINED).stat().st_size
            content = {"metadata": {"total_size": nbytes}, "weight_map": dict.fromkeys(names, _TRAINED)}
        parts = self.read()
        content["metadata"]["total_size"] += sum(part.values.nbytes for part in parts)
        content["weight_map"] |= dict.fromkeys(self.tensors, _OTHERS)
        write_safetensors(folder / _OTHERS, parts)
        index.write_text(json.dumps(content, indent=2), encoding="utf-8")


NO_OTHERS: Final = OtherParts({}, {})
"""For a model whose files hold nothing else."""
