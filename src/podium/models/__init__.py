"""A model from a directory, the hub or a shape, and back: files, shards, manifests, tokenizers."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.models.config import LoraConfig as LoraConfig, ModelConfig as ModelConfig
    from podium.models.loading import load_model as load_model
    from podium.models.tokenizers import char_tokenizer as char_tokenizer, load_tokenizer as load_tokenizer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
