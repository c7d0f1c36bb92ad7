"""What is learned of random conversations, by templates and tokenizers of our own: right, or refused.

Texts are empty, blank, equal to others, or parts of a template. What is learned of each turn is known beforehand.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig, Example, encode_pairs
from podium.rollout.tasks.chat_encoder import ChatEncoder
from tests.unit.rollout.tasks.test_spans import OPEN, SIGNS, make_tokenizer

HEAD = "<|start|>{{ m.role }}:"
EACH = "{% for m in messages %}"
MARKED = (
    EACH + "<|start|>{{ m.role }}:{% if m.role == 'assistant' %}BEGIN{{ m.content }}END{% else %}"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}" + OPEN
)
BEGIN, END = "{% generation %}", "{% endgeneration %}"
Expected = Callable[[str, bool], str]
"""The learned text of a turn, by its content and whether it is the last."""


def each(turn: str, opening: str = OPEN) -> str:
    return f"{EACH}{turn}{{% endfor %}}{opening}"


def marked(begin: str, end: str) -> str:
    return MARKED.replace("BEGIN", begin).replace("END", end)


TEMPLATES: dict[str, tuple[str, Expected | None]] = {
    "plain": (each(HEAD + "{{ m.content }}<|end|>"), lambda text, _: text + "<|end|>"),
    "lines": (
        each(HEAD + "\n{{ m.content }}<|end|>\n", "{% if add_generation_prompt %}<|start|>assistant:\n{% endif %}"),
        lambda text, _: text + "<|end|>",
    ),
    "trims": (each(HEAD + "{{ m.content | trim }}<|end|>"), lambda text, _: text.strip() + "<|end|>"),
    "trims after a space": (
        each(HEAD + " {{ m.content | trim }}<|end|>", "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"),
        lambda text, _: text.strip() + "<|end|>",
    ),
    "system in the first user turn": (
        (
            "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
            "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
            "{% if m.role == 'assistant' %} {{ m.content }} </s>"
            "{% else %}<s>[{{ m.role }}] {{ s if loop.first }}{{ m.content }} [/{{ m.role }}]{% endif %}{% endfor %}"
        ),
        lambda text, _: f" {text} </s>",
    ),
    "another last end": (
        each(HEAD + "{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"),
        lambda text, last: text + ("<|return|>" if last else "<|end|>"),
    ),
    "two ends": (
        each(HEAD + "{{ m.content }}{{ '<|stop|>' if m.role == 'assistant' }}<|end|>"),
        lambda text, _: text + "<|stop|><|end|>",
    ),
    "no end": (
        each("<|{{ m.role }}|>{{ m.content }}", "{% if add_generation_prompt %}<|assistant|>{% endif %}"),
        None,
    ),
    "drops empty turns": (
        each("{% if m.content or m.role != 'assistant' %}" + HEAD + "{{ m.content }}<|end|>{% endif %}"),
        lambda text, _: text + "<|end|>",
    ),
    "joins turns": (
        each(
            "{% if not (m.role == 'assistant' and loop.previtem and loop.previtem.role == 'assistant') %}"
            + HEAD
            + "{% endif %}{{ m.content }}"
            "{% if not (m.role == 'assistant' and loop.nextitem and loop.nextitem.role == 'assistant') %}"
            "<|end|>{% endif %}"
        ),
        None,
    ),
    "results in another order": (
        "{% for t in messages if t.role == 'tool' %}<|tool|>{{ t.content }}{% endfor %}"
        "{% for m in messages if m.role != 'tool' %}" + HEAD + "{{ m.content }}<|end|>{% endfor %}" + OPEN,
        lambda text, _: text + "<|end|>",
    ),
    "strips thinking": (
        each(HEAD + "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('!')[-1] }}<|end|>"),
        lambda text, last: (text if last else text.split("!")[-1]) + "<|end|>",
    ),
    "counts messages": ("{{ messages | length }}" + each(HEAD + "{{ m.content }}<|end|>"), lambda text, _: text),
    "opens with thinking": (
        each(
            HEAD + "{{ '<t></t>' if m.role == 'assistant' and loop.last }}{{ m.content }}<|end|>",
            "{% if add_generation_prompt %}<|start|>assistant:<t></t>{% endif %}",
        ),
        lambda text, _: text + "<|end|>",
    ),
    "no special tokens": (
        each("{{ m.role }}: {{ m.content }}\n", "{% if add_generation_prompt %}assistant: {% endif %}"),
        None,
    ),
    "upper case": (each(HEAD + "{{ m.content | upper }}<|end|>"), lambda text, _: text.upper() + "<|end|>"),
    "marks the text": (marked(BEGIN, END + "<|end|>"), lambda text, _: text + "<|end|>"),
    "marks the end too": (marked(BEGIN, "<|end|>" + END), lambda text, _: text + "<|end|>"),
    "marks one of two ends": (marked(BEGIN, "<|stop|>" + END + "<|end|>"), lambda text, _: text + "<|stop|><|end|>"),
    "marks before a line": (marked(BEGIN, END + "\n<|end|>"), lambda text, _: text + "\n<|end|>"),
    "marks all but the user": (
        each(
            HEAD + "{% if m.role != 'user' %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% else %}{{ m.content }}{% endif %}<|end|>"
        ),
        lambda text, _: text + "<|end|>",
    ),
}


def of_core(core: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=SIGNS[3:],
    )  # fmt: skip


CHARACTERS = [chr(code) for code in range(32, 127)] + ["▁", "\n"]


def vocabulary(*more: str) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys([*SIGNS, *CHARACTERS, *more]))}


def byte_level(prefix: bool = False) -> PreTrainedTokenizerFast:
    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SIGNS, initial_alphabet=alphabet)  # type: ignore[call-arg]
    core.train_from_iterator(["alpha beta user: assistant: tool\n\nsystem aa ab ba"] * 50, trainer)
    return of_core(core)


def merges_over_borders() -> PreTrainedTokenizerFast:
    merges = [(":", "a"), ("a", "b"), (" ", "a"), ("\n", "a"), ("b", "a"), (":", "\n"), (":", " ")]
    core: Any = Tokenizer(models.BPE(vocab=vocabulary(*map("".join, merges)), merges=merges, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return of_core(core)


def byte_fallback() -> PreTrainedTokenizerFast:
    tokens = [*SIGNS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ablph", "▁a", "ab"]
    numbers, merges = {token: index for index, token in enumerate(tokens)}, [("▁", "a"), ("a", "b")]
    core: Any = Tokenizer(
        models.BPE(vocab=numbers, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return of_core(core)


def normalized(normalizer: Any) -> PreTrainedTokenizerFast:
    core: Any = Tokenizer(models.BPE(vocab=vocabulary("é", "\u0301"), merges=[], unk_token="<unk>"))
    core.normalizer, core.decoder = normalizer, decoders.Fuse()
    return of_core(core)


def unigram() -> PreTrainedTokenizerFast:
    pieces = [("▁a", -2.0), ("ab", -1.5), (":a", -1.0), ("▁▁", -2.0)]
    core: Any = Tokenizer(
        models.Unigram([*((token, 0.0) for token in SIGNS), *((c, -5.0) for c in CHARACTERS), *pieces], 0)
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    return of_core(core)


def signs_that_take_spaces() -> PreTrainedTokenizerFast:
    tokenizer = normalized(None)
    signs: Any = [
        AddedToken("<|end|>", special=True, lstrip=True, rstrip=True),
        AddedToken("<|start|>", special=True, lstrip=True),
    ]
    tokenizer.add_tokens(signs, special_tokens=True)
    return tokenizer


TOKENIZERS: list[
    tuple[Callable[[], PreTrainedTokenizerFast], bool]
] = [  # and whether it splits every text at its signs
    *((lambda spaces=spaces: make_tokenizer(None, spaces), True) for spaces in ("none", "legacy", "always", "first")),
    (byte_level, False),
    (lambda: byte_level(prefix=True), True),
    (merges_over_borders, False),
    (byte_fallback, True),
    *((lambda n=n: normalized(n), True) for n in (normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase())),
    (lambda: normalized(normalizers.Strip()), True),
    (unigram, False),
    (signs_that_take_spaces, True),
]
WORDS = [
    "alpha",
    "a",
    "b",
    "ab",
    " a",
    "a ",
    "\na",
    "\n\n",
    "",
    "5",
    "  ",
    "x!y",
    "é",
    "ﬁ",
    "日本",
    "user:",
    "<",
    "assistant: a",
]


def converse(dice: random.Random) -> list[dict[str, Any]]:
    def say(role: str, *words: str) -> dict[str, Any]:
        return {"role": role, "content": "".join(words)}

    messages = [say("system", dice.choice(WORDS))] if dice.random() < 0.3 else []
    for _ in range(dice.randint(1, 3)):
        messages.append(say("user", *dice.choices(WORDS, k=2)))
        if dice.random() < 0.2:
            messages.append(say("assistant", dice.choice(WORDS)))
            messages += [say("tool", dice.choice(WORDS)) for _ in range(dice.randint(1, 2))]
        messages.append(say("assistant", *dice.choices(WORDS, k=2)))
        if dice.random() < 0.1:
            messages.append(say("assistant", dice.choice(WORDS), "z"))
    return messages


def check(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    row: Any,
    turns: list[int],
    exact: bool,
    expected: Expected | None,
) -> None:
    """Check one row: ``messages`` end with it, and it learns the ``turns``."""
    ids, mask = row
    encoder = ChatEncoder(tokenizer, DataConfig())
    whole = tokenizer(str(tokenizer.apply_chat_template(messages, tokenize=False)), add_special_tokens=False)[
        "input_ids"
    ]
    assert str(tokenizer.decode(whole)).startswith(str(tokenizer.decode(ids)).removesuffix("</s>")), "another text"
    if expected is not None:
        said = "".join(expected(messages[at]["content"], at == len(messages) - 1) for at in turns)
        read = tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"])
        learned = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
        assert "".join(str(learned).split()) == "".join(str(read).split())
    if exact or ids[: len(whole)] == whole[: len(ids)]:
        prompt = encoder.encode(encoder.text(messages[: turns[-1]], opened=True))
        assert ids[: len(prompt)] == prompt, "the prompt is not the server's"
        assert all(mask[len(prompt) :]), "a token that the model generates is not learned"
        first = len(encoder.encode(encoder.text(messages[: turns[0]], opened=True)))
        assert len(turns) > 1 or not any(mask[:first]), "a part of the prompt is learned"


@pytest.mark.everyday(
    "plain-2",
    "trims-2",
    "marks one of two ends-2",
    "system in the first user turn-2",
    "strips thinking-2",
    "results in another order-2",
)
@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_are_learned_right_or_refused(name: str, rounds: int) -> None:
    template, expected = TEMPLATES[name]
    learned = 0
    for number, (make, splits) in enumerate(TOKENIZERS):
        tokenizer, dice = make(), random.Random(f"{name}{number}")
        tokenizer.chat_template = template
        for _ in range(rounds):
            messages, kind = converse(dice), dice.choice(("whole", "split", "pair"))
            turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
            turns = turns[dice.randrange(len(turns)) :] if kind == "pair" else turns
            begin = turns[0] if kind == "pair" else len(messages) - 1
            example = Example(messages[:begin], "", {}, turns=messages[begin:], whole=kind != "pair")
            try:
                rows = encode_pairs([example], tokenizer, DataConfig(split_turns=kind == "split"))
            except (ConfigError, DataError):
                continue
            learned += 1
            if kind != "split":
                check(tokenizer, messages, rows[0], turns, splits, expected)
                continue
            assert len(rows) == len(turns)
            for at, row in zip(turns, rows, strict=True):
                check(tokenizer, messages[: at + 1], row, [at], splits, expected)
    assert learned or name == "counts messages"
