"""Prompts and pairs to token ids, with tokenizers of several habits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from huggingface_hub import constants
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from podium.errors import ConfigError, DataError
from podium.models import ModelConfig, char_tokenizer
from podium.rewards import RewardConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig, EncodedPairs, Example, encode_pairs, encode_prompts
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.examples import map_columns
from podium.rollout.tasks.text_encoder import TextEncoder
from podium.telemetry import Event, Note, subscribe
from podium.trainer.checks.preflight import check_answers, with_stop_tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "user assistant"]


def byte_tokenizer(chat_template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2's, Qwen's and Llama 3's are; with ``bos`` one that begins and ends each text."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if bos:
        core.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def example(prompt: Any, answer: str | None = "yes") -> Example:
    return Example(prompt, answer, {"prompt": prompt, "answer": answer})


def written(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_plain_text_without_a_template() -> None:
    tokenizer = byte_tokenizer()
    encoded = encode_prompts([example("the fox"), example("a dog")], tokenizer, DataConfig())
    assert [written(tokenizer, ids) for ids in encoded.token_ids] == ["the fox", "a dog"]
    assert (encoded.kept, encoded.dropped, encoded.cut) == ([0, 1], 0, 0)
    encoded = encode_prompts([example("the fox")], tokenizer, DataConfig(system_prompt="Be brief."))
    assert written(tokenizer, encoded.token_ids[0]) == "Be brief.\n\nthe fox"


def test_a_tokenizer_that_begins_and_ends_texts_only_begins_prompts() -> None:
    tokenizer = byte_tokenizer(bos=True)
    assert written(tokenizer, tokenizer("the fox")["input_ids"]) == "<s>the fox</s>"
    encoded = encode_prompts([example("the fox")], tokenizer, DataConfig())
    assert written(tokenizer, encoded.token_ids[0]) == "<s>the fox"


@pytest.mark.parametrize("first", ["<s>", "<s> ", "<s>\n", "<s>user: "])
def test_a_text_that_begins_with_the_first_token_has_it_once(first: str) -> None:
    """Chat templates of Llama and Gemma write it, and texts that they have written are prompts and rows to learn."""
    tokenizer = byte_tokenizer(bos=True)
    text = first + "the fox"
    encoded = encode_prompts([example(text), example("the fox"), example("<s>")], tokenizer, DataConfig())
    assert [written(tokenizer, ids) for ids in encoded.token_ids] == [text, "<s>the fox", "<s>"]
    pairs = encode_pairs(
        [example(text, "yes"), Example(text, None, {"text": text}, whole=True)], tokenizer, DataConfig()
    )
    assert [written(tokenizer, ids) for ids, _ in pairs] == [f"{text}yes</s>", f"{text}</s>"]
    twice = encode_prompts([example("<s><s>the fox")], byte_tokenizer(), DataConfig())
    assert written(tokenizer, twice.token_ids[0]) == "<s><s>the fox", (
        "a tokenizer that adds none takes texts as they are"
    )


def test_a_chat_template_writes_system_prompt_turns_and_the_opening_of_the_answer() -> None:
    tokenizer = byte_tokenizer(CHATML, bos=True)
    config = DataConfig(system_prompt="Be brief.")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "a dog"}]
    encoded = encode_prompts([example("the fox"), example(own)], tokenizer, config)
    assert [written(tokenizer, ids) for ids in encoded.token_ids] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n",
    ], "no second beginning-of-sequence token, and a conversation keeps its own system message"
    whole = tokenizer.apply_chat_template(own, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encoded.token_ids[1] == whole


def test_the_template_is_a_choice(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML)
    (ids,) = encode_prompts([example("the fox")], tokenizer, DataConfig(chat_template="none")).token_ids
    assert written(tokenizer, ids) == "the fox"
    path = tmp_path / "chat.jinja"
    path.write_text("Q: {{ messages[-1]['content'] }} A:")
    (ids,) = encode_prompts([example("the fox")], tokenizer, DataConfig(chat_template=str(path))).token_ids
    assert written(tokenizer, ids) == "Q: the fox A:"
    with pytest.raises(ConfigError, match=r"data\.chat_template = 'chatml' cannot be read"):
        encode_prompts([example("the fox")], tokenizer, DataConfig(chat_template="chatml"))


def test_templates_that_do_not_fit_are_explained() -> None:
    conversation = example([{"role": "user", "content": "hm"}])
    with pytest.raises(ConfigError, match=r"a conversation, and there is no chat template.*data\.chat_template"):
        encode_prompts([conversation], byte_tokenizer(), DataConfig())
    with pytest.raises(ConfigError, match=r"no system; .*may not support system prompts"):
        encode_prompts([conversation], byte_tokenizer(NO_SYSTEM), DataConfig(system_prompt="Be brief."))


# -- length ----------------------------------------------------------------------------------------------------------

LONG = "the quick brown fox jumps over the lazy dog " * 20 + "so what?"


def test_a_prompt_that_is_too_long_is_dropped_and_counted() -> None:
    tokenizer = byte_tokenizer(CHATML)
    encoded = encode_prompts([example("a"), example(LONG), example("b")], tokenizer, DataConfig(max_prompt_tokens=40))
    assert (encoded.kept, encoded.dropped, encoded.cut) == ([0, 2], 1, 0)
    limit = len(encode_prompts([example(LONG)], tokenizer, DataConfig()).token_ids[0])
    for allowed, kept in ((limit, [0, 1]), (limit - 1, [0])):
        encoded = encode_prompts([example("a"), example(LONG)], tokenizer, DataConfig(max_prompt_tokens=allowed))
        assert encoded.kept == kept, "exactly the limit is not too long"


@pytest.mark.parametrize(("chat", "conversation"), [(False, False), (True, False), (True, True)])
def test_a_cut_prompt_keeps_its_end_the_system_prompt_and_the_template(chat: bool, conversation: bool) -> None:
    tokenizer = byte_tokenizer(CHATML if chat else None, bos=True)
    config = DataConfig(max_prompt_tokens=60, overlong="cut", system_prompt="Be brief.")
    prompt = [{"role": "user", "content": LONG}] if conversation else LONG
    encoded = encode_prompts([example("a"), example(prompt)], tokenizer, config)
    assert (encoded.kept, encoded.dropped, encoded.cut) == ([0, 1], 0, 1)
    ids = encoded.token_ids[1]
    assert 50 < len(ids) <= 60
    text = written(tokenizer, ids)
    if chat:
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith("lazy dog so what?<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert text.startswith("<s>Be brief.\n\n")
        assert text.endswith("lazy dog so what?")


def test_characters_of_several_tokens_are_cut_to_length_too() -> None:
    tokenizer = byte_tokenizer(CHATML)
    config = DataConfig(max_prompt_tokens=40, overlong="cut")
    encoded = encode_prompts([example("a"), example("\N{GRINNING FACE}" * 50)], tokenizer, config)
    assert encoded.cut == 1
    assert len(encoded.token_ids[1]) <= 40


def test_a_prompt_that_ends_in_a_call_of_a_tool_has_no_text_to_cut() -> None:
    prompt = [{"role": "user", "content": "x" * 99}, {"role": "assistant", "tool_calls": [{"name": "add"}]}]
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}{% endfor %}"
    )
    config = DataConfig(overlong="cut", max_prompt_tokens=20)
    found = encode_prompts([example(prompt), example("a")], byte_tokenizer(template), config)
    assert (found.kept, found.dropped, found.cut) == ([1], 1, 0)


def test_a_template_longer_than_the_limit_leaves_nothing_and_says_so() -> None:
    config = DataConfig(max_prompt_tokens=10, overlong="cut", system_prompt=LONG)
    with pytest.raises(
        DataError, match=r"each of the 1 prompt is longer than data\.max_prompt_tokens = 10 \(the shortest"
    ):
        encode_prompts([example("a")], byte_tokenizer(CHATML), config)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match=r"^the row of the prompt '': the prompt '' has no tokens"):
        encode_prompts([example("a"), example("")], byte_tokenizer(), DataConfig())
    assert not encode_prompts([], byte_tokenizer(), DataConfig()).token_ids


# -- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_pair_is_the_prompt_as_generated_from_then_the_answer_and_the_end(template: str | None) -> None:
    tokenizer = byte_tokenizer(template, bos=True)
    examples = [example("the fox", "jumps"), example("a dog", "")]
    prompts = encode_prompts(examples, tokenizer, DataConfig()).token_ids
    for prompt, pair, answer in zip(
        prompts, encode_pairs(examples, tokenizer, DataConfig()), ["jumps", ""], strict=True
    ):
        ids, mask = pair
        assert len(ids) == len(mask)
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert written(tokenizer, ids[len(prompt) :]) == answer + ("<|im_end|>" if template else "</s>")


def test_long_prompts_of_pairs_are_counted_in_a_note() -> None:
    heard: list[Event] = []
    unsubscribe = subscribe(heard.append)
    pairs = encode_pairs(
        [example(LONG, "no"), example("the fox", "jumps")], byte_tokenizer(), DataConfig(max_prompt_tokens=20)
    )
    unsubscribe()
    assert len(pairs) == 1
    assert [one for one in heard if isinstance(one, Note)] == [Note("prompts too long: 1 dropped, 0 cut, of 2")]


def test_pairs_need_answers_and_an_end() -> None:
    with pytest.raises(DataError, match=r"prompt 'b': there is no answer to learn.*data\.answer_column"):
        encode_pairs([example("a"), example("b", None)], byte_tokenizer(), DataConfig())
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        encode_pairs([example("a")], tokenizer, DataConfig())


def test_empty_answers_are_told() -> None:
    tokenizer = byte_tokenizer()
    rows = [example("a", ""), example("b", "c")]
    (note,) = notes_of(lambda: encode_pairs(rows, tokenizer, DataConfig()))
    assert note == "1 of 2 answers is empty: the model learns to say nothing after these prompts"
    (note,) = notes_of(lambda: check_answers(rows, RewardConfig()))
    assert note == "1 of 2 answers is empty: the reward 'exact' has nothing to compare their completions with"


# -- what a tokenizer cannot read ------------------------------------------------------------------------------------


def notes_of(work: Callable[[], Any]) -> list[str]:
    heard: list[str] = []
    unsubscribe = subscribe(lambda event: heard.extend([event.text] if isinstance(event, Note) else []))
    try:
        work()
    finally:
        unsubscribe()
    return heard


def test_unknown_characters_are_told_and_nothing_else_is_refused() -> None:
    tokenizer = char_tokenizer("0123456789+= ")
    blind, some, fine = example("\u65e5\u672c", "1"), example("1 \u65e5", "\u672c"), example("1+1=", "2")
    for encode in (encode_prompts, encode_pairs):
        said = r"2 of 3 prompts hold characters that the tokenizer does not know, such as '.', '.': the model would see"
        with pytest.raises(DataError, match=said + r" nothing but <unk>; set model\.tokenizer"):
            encode([blind, blind, fine], tokenizer, DataConfig())
    assert notes_of(lambda: encode_pairs([some, fine, fine], tokenizer, DataConfig())) == [
        f"1 of 3 {what} holds characters that the tokenizer does not know, such as {sign!r}: the model sees <unk> in "
        "their place"
        for what, sign in (("prompts", "\u65e5"), ("answers", "\u672c"))
    ]
    with pytest.raises(DataError, match="3 of 3 answers hold"):
        encode_pairs([some] * 3, tokenizer, DataConfig())
    assert notes_of(lambda: encode_pairs([fine], tokenizer, DataConfig())) == []


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of pairs, as BPE makes them, without a token for what it has not seen."""
    core = tokenizers.Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3, "=": 4}, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_characters_without_any_token_are_told_with_their_share() -> None:
    tokenizer, some, fine = letters_tokenizer(), example("ab\u00e9=", "b\u00fc"), example("a b=", "a")
    assert notes_of(lambda: encode_pairs([some, fine, fine], tokenizer, DataConfig())) == [
        f"1 of 3 {what} holds characters for which the tokenizer has no token, such as {sign!r}: the model does not "
        "see them; set model.tokenizer"
        for what, sign in (("prompts", "\u00e9"), ("answers", "\u00fc"))
    ]
    assert len(notes_of(lambda: encode_prompts([some, fine], tokenizer, DataConfig()))) == 1
    assert notes_of(lambda: encode_pairs([fine], tokenizer, DataConfig())) == []
    assert notes_of(lambda: encode_pairs([some], byte_tokenizer(), DataConfig())) == []


def test_half_a_surrogate_pair_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(DataError, match="half of a surrogate pair, which is no text, stands near"):
        encode_prompts([example("a")], byte_tokenizer(), DataConfig(system_prompt="be \ud800 brief"))


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(CHATML), char_tokenizer("a ")])
def test_a_text_of_30_mb_is_answered_at_once(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer, which takes a minute for such a text, gets none."""
    huge = "a \N{GRINNING FACE}" * 10_000_000
    lengths, encode_texts = [0], TextEncoder._encoding

    def encode_and_count(encoder: TextEncoder, texts: list[str], **options: bool) -> Any:
        lengths.extend(map(len, texts))
        return encode_texts(encoder, texts, **options)

    monkeypatch.setattr(TextEncoder, "_encoding", encode_and_count)
    assert encode_prompts([example("a"), example(huge)], tokenizer, DataConfig()).kept == [0]
    cut = encode_prompts([example("a"), example(huge)], tokenizer, DataConfig(overlong="cut"))
    assert cut.cut == 1 and len(cut.token_ids[1]) <= 1024
    with pytest.raises(DataError, match=r"each of the 1 prompt is longer .*each has far more"):
        encode_prompts([example(huge)], tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"prompt 'a': the answer has 30,000,000 characters, more than"):
        encode_pairs([example("a", huge)], tokenizer, DataConfig())
    assert 0 < max(lengths) < len(huge) / 100


def test_a_tokenizer_without_an_end_is_told() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    model = ModelConfig(config={"model_type": "qwen3", "vocab_size": 400}, tokenizer="chars:x")
    given = SamplingParams(max_new_tokens=7)
    (note,) = notes_of(lambda: with_stop_tokens(given, model, tokenizer, DataConfig()))
    assert "every completion has sampling.max_new_tokens = 7 tokens: set eos_token" in note


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_token_ids_are_kept_until_something_changes_that_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 2)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    folder = tmp_path / "podium" / "tokens"
    examples = [example("the fox", "jumps"), example("a dog", "sleeps")]
    tokenizer = byte_tokenizer(CHATML)
    for count, (encode, given, config) in enumerate(
        [
            (encode_prompts, examples, DataConfig()),
            (encode_pairs, examples, DataConfig()),
            (encode_pairs, [examples[0], example("a dog", "sleeps on")], DataConfig()),
            (encode_pairs, examples, DataConfig(system_prompt="Be brief.")),
            (encode_pairs, examples, DataConfig(max_prompt_tokens=40)),
            (encode_pairs, examples, DataConfig(chat_template="none")),
        ],
        start=1,
    ):
        made, again = encode(given, tokenizer, config), encode(given, tokenizer, config)
        rows = [list(found.token_ids) for found in (made, again)]
        assert rows[0] == rows[1] and rows[0]
        assert len(list(folder.iterdir())) == count
        if isinstance(made, EncodedPairs) and isinstance(again, EncodedPairs):
            assert list(made.loss_mask) == list(again.loss_mask)
    monkeypatch.setattr("podium.rollout.tasks.encode.save_file", None)  # what is there is read, and nothing is encoded
    monkeypatch.setattr(ChatEncoder, "prompts", None)
    assert list(encode_prompts(examples, tokenizer, DataConfig()).kept) == [0, 1]


def test_what_is_kept_hides_no_row_that_a_check_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of these rows were ignored once the same rows without them had been encoded."""
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    tokenizer, config = byte_tokenizer("{{ documents }}" + CHATML), DataConfig()

    def rows(**columns: Any) -> list[Example]:
        return [
            map_columns(f"row {n}", {"prompt": f"the fox {n}", "answer": "jumps", **columns}, config) for n in (1, 2)
        ]

    for encode in (encode_prompts, encode_pairs):
        assert len(encode(rows(), tokenizer, config).token_ids) == 2
        refused = [
            ({"documents": "Rome"}, "has a variable of this name"),
            ({"image": {"bytes": b"x"}}, "holds an image"),
        ]
        if encode is encode_pairs:
            refused += [
                ({"completion": "sleeps"}, "column 'completion'"),
                ({"train": False}, "a part of the row is not learned"),
            ]
        for columns, message in refused:
            with pytest.raises(DataError, match=message):
                encode(rows(**columns), tokenizer, config)
        count = len([*(tmp_path / "podium" / "tokens").iterdir()])
        assert len(encode(rows(source="the web"), tokenizer, config).token_ids) == 2
        assert len([*(tmp_path / "podium" / "tokens").iterdir()]) == count, "nothing reads this column"


def test_rows_that_were_left_out_are_refused_where_bad_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    examples = [example("the fox"), Example("a dog", None, {"prompt": "a dog"})]
    assert len(encode_pairs(examples, byte_tokenizer(), DataConfig(bad_rows="drop"))) == 1
    for _ in range(2):
        with pytest.raises(DataError, match="there is no answer to learn"):
            encode_pairs(examples, byte_tokenizer(), DataConfig())


def test_a_template_that_writes_the_time_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    tokenizer = byte_tokenizer("{{ strftime_now('%f') }}" + CHATML)
    drawn = {written(tokenizer, encode_prompts([example("a")], tokenizer, DataConfig()).token_ids[0]) for _ in range(9)}
    assert len(drawn) > 1


def test_a_kept_file_that_is_broken_is_made_again_and_one_that_cannot_be_written_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    tokenizer, examples = byte_tokenizer(), [example("the fox")]
    whole = list(encode_prompts(examples, tokenizer, DataConfig()).token_ids)
    (file,) = (tmp_path / "podium" / "tokens").iterdir()
    for broken in (b"", b"nonsense" * 9, file.read_bytes()[:-3]):
        file.write_bytes(broken)
        assert list(encode_prompts(examples, tokenizer, DataConfig()).token_ids) == whole
    monkeypatch.setattr(constants, "HF_HOME", str(file))  # no directory
    assert list(encode_prompts(examples, tokenizer, DataConfig()).token_ids) == whole
