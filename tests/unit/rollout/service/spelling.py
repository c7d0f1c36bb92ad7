"""Tokenizers of three kinds: of characters, of bytes as GPT-2's, and of pieces as sentencepiece's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from podium.models import char_tokenizer
from tests.unit.rollout.service.scripted import ALPHABET, CHATML, SPECIAL

KINDS = ("characters", "bytes", "pieces")
_TEXTS = ['{"name": "look", "arguments": {"place": "here"}}', "the quick brown fox, yes, no, maybe 12345: [1, 2]"] * 20


@cache
def make_tokenizer(kind: str, template: str = CHATML, special: Sequence[str] = SPECIAL) -> Any:
    """Return a tokenizer of a kind with a chat template and these special tokens."""
    if kind == "characters":
        tokenizer: Any = char_tokenizer(ALPHABET, chat_template=template)
        tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
        return tokenizer
    known = ["<unk>", "</s>", *([f"<0x{byte:02X}>" for byte in range(256)] if kind == "pieces" else [])]
    core: Any = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "pieces", fuse_unk=True))
    alphabet: list[str] = []
    if kind == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    trainer: Any = trainers.BpeTrainer
    core.train_from_iterator(
        _TEXTS, trainer(vocab_size=480, special_tokens=known, initial_alphabet=alphabet, show_progress=False)
    )
    written = json.loads(core.to_str())  # the trainer takes the pieces of bytes for special tokens
    written["added_tokens"] = [token for token in written["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(written))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    return tokenizer
