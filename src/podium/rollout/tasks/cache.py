"""Token ids of large data, kept on the disk under a digest of all that they depend on, and mapped into memory.

What is kept is never stale: another text, tokenizer or setting has another digest.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["read_or_compute"]

_logger = logging.getLogger(__name__)

_FORM: Final = 7  # of the files; another one makes all earlier files unused
_FROM: Final = 2000  # examples; fewer are encoded in less time than a tokenizer is compared


def read_or_compute(
    make: Callable[[], dict[str, Tensor]],
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    settings: object,
    contents: Iterable[object],
    count: int,
) -> dict[str, Tensor]:
    """Return ``make()``, or what it returned before for the same tokenizer, settings and contents.

    Files are in ``podium/tokens`` below ``HF_HOME``. A file that cannot be read is made again; one that cannot be
    written is left out.

    Args:
        make: Encodes the examples.
        kind: What is encoded.
        tokenizer: The tokenizer that encodes. A tokenizer in plain Python cannot be compared, so its results are not
            kept.
        settings: Further values on which the result depends, in addition to tokenizer and contents. Its ``repr`` is
            compared.
        contents: The text of each example, in plain values. Its ``repr`` is compared.
        count: Number of the examples.
    """
    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    if count < _FROM or core is None:
        return make()
    identity = (type(tokenizer).__qualname__, tokenizer.special_tokens_map, core.to_str(), transformers.__version__)
    digest = hashlib.blake2b(repr((_FORM, kind, settings, identity)).encode(*_CODING), digest_size=20)
    for content in contents:
        digest.update(repr(content).encode(*_CODING))
    path = Path(constants.HF_HOME) / "podium" / "tokens" / f"{digest.hexdigest()}.safetensors"
    try:
        return load_file(path)
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError) as error:
        _logger.info("%s is made again: %s", path, error)
    made = make()
    aside = path.with_suffix(f".{secrets.token_hex(8)}.tmp")  # processes in two containers may have one number
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(made, aside)
        aside.replace(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        _logger.info("the token ids cannot be cached at %s, so the next run computes them again: %s", path, error)
        with suppress(OSError):
            aside.unlink()
        return made


_CODING: Final = ("utf-8", "surrogatepass")
