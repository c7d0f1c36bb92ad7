"""Rows of preferences in the forms of the field: what is read of them, and how malformed ones are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig, load_examples
from podium.telemetry import Note, subscribe
from podium_preferences import EncodedPreferences, encode_preferences, read_labeled, read_pair
from podium_preferences.trainer import _mismatch
from tests.unit.rollout.tasks.test_encode import byte_tokenizer, notes_of
from tests.unit.rollout.tasks.test_schemas import SUM, TOOLS, model, system, user

ASKED = f"<|im_start|>user\n{SUM}<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"


def load(folder: Path, rows: list[dict[str, Any]], labels: bool = False, **settings: Any) -> EncodedPreferences:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(file), holdout=0, **settings)
    examples = load_examples(config.train, config, read=read_labeled if labels else read_pair)
    return encode_preferences(examples, byte_tokenizer(TOOLS), config)


def texts_of(rows: EncodedPreferences, row: int = 0) -> list[tuple[str, str]]:
    """Prompt and learned part of each answer."""
    tokenizer = byte_tokenizer(TOOLS)
    texts: list[tuple[str, str]] = []
    for ids, mask in rows[row].answers:
        first = mask.index(True)
        learned = [token for token, counts in zip(ids, mask, strict=True) if counts]
        texts.append((str(tokenizer.decode(ids[:first])), str(tokenizer.decode(learned))))
    return texts


PAIR = [(ASKED + OPENED, "7<|im_end|>"), (ASKED + OPENED, "8<|im_end|>")]
IN_SYSTEM = [("<|im_start|>system\nAdd.<|im_end|>\n" + prompt, answer) for prompt, answer in PAIR]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = {
    "texts": ({"prompt": SUM, "chosen": "7", "rejected": "8"}, {}, PAIR),
    "messages": ({"prompt": [user(SUM)], "chosen": [model("7")], "rejected": [model("8")]}, {}, PAIR),
    "a prompt of messages, answers of text": ({"prompt": [user(SUM)], "chosen": "7", "rejected": "8"}, {}, PAIR),
    "conversations": ({"chosen": [user(SUM), model("7")], "rejected": [user(SUM), model("8")]}, {}, PAIR),
    "UltraFeedback": (
        {"prompt": SUM, "chosen": [user(SUM), model("7")], "rejected": [user(SUM), model("8")], "score_chosen": 9.0},
        {},
        PAIR,
    ),
    "Orca": (
        {"system": "Add.", "question": SUM, "chosen": "7", "rejected": "8"},
        {"prompt_column": "question"},
        IN_SYSTEM,
    ),
    "a system message in the conversations": (
        {"chosen": [system("Add."), user(SUM), model("7")], "rejected": [system("Add."), user(SUM), model("8")]},
        {},
        IN_SYSTEM,
    ),
    "the system prompt of the settings": (
        {"chosen": [user(SUM), model("7")], "rejected": [user(SUM), model("8")]},
        {"system_prompt": "Add."},
        IN_SYSTEM,
    ),
    "OpenAI": (
        {"input": {"messages": [user(SUM)]}, "preferred_output": [model("7")], "non_preferred_output": [model("8")]},
        {"prompt_column": "input.messages"},
        PAIR,
    ),
    "LLaMA-Factory (ShareGPT)": (
        {
            "conversations": [{"from": "human", "value": SUM}],
            "chosen": {"from": "gpt", "value": "7"},
            "rejected": {"from": "gpt", "value": "8"},
        },
        {},
        PAIR,
    ),
    "HH-RLHF": (
        {"chosen": f"\n\nHuman: {SUM}\n\nAssistant: 7", "rejected": f"\n\nHuman: {SUM}\n\nAssistant: 8"},
        {},
        PAIR,
    ),
    "columns of other names": (
        {"question": SUM, "chosen_response": "7", "rejected_response": "8", "chosen_model": "a", "rejected_model": "b"},
        {"prompt_column": "question", "answer_column": "chosen_response"},
        PAIR,
    ),
    "several turns in common": (
        {
            "chosen": [user(SUM), model("Hm."), user("So?"), model("7")],
            "rejected": [user(SUM), model("Hm."), user("So?"), model("8")],
        },
        {},
        [
            (f"{ASKED}{OPENED}Hm.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n{OPENED}", answer)
            for answer in ("7<|im_end|>", "8<|im_end|>")
        ],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_read_in_each_form_of_the_field(tmp_path: Path, form: str) -> None:
    row, settings, expected = FORMS[form]
    rows = load(tmp_path, [row], **settings)
    assert texts_of(rows) == expected
    assert rows[0].chosen == (True, False)
    assert rows[0].margin is None


PLAIN = {"prompt": SUM, "chosen": "7", "rejected": "8"}
LONGER = {"prompt": SUM, "response_chosen": "7", "response_rejected": "8"}


@pytest.mark.parametrize(
    ("answers", "others"),
    [
        (PLAIN, {"chosen_model": "gpt", "rejected_model": "llama"}),
        (PLAIN, {"score_chosen": 9.5, "score_rejected": 3.0}),
        (PLAIN, {"chosen_rationale": "It is right.", "rejected_rationale": "It is wrong."}),
        (PLAIN, {"chosen_logps": "-1.5", "rejected_logps": "-2.5", "chosen_id": "a", "rejected_id": "b"}),
        (LONGER, {"model_chosen": "gpt", "model_rejected": "llama"}),
        (LONGER, {"chosenScore": "9.5", "rejectedScore": "3"}),
        (LONGER, {"length_chosen": 1, "length_rejected": 1, "chosen_wins": 3, "rejected_wins": 1}),
        ({"prompt": SUM, "preferred": "7", "dispreferred": "8"}, {"preferred_by": "a", "dispreferred_by": "b"}),
        ({"prompt": SUM, "chosen_number": 7, "rejected_number": 8}, {}),
    ],
)
def test_the_order_of_columns_does_not_decide_which_are_the_answers(
    tmp_path: Path, answers: dict[str, Any], others: dict[str, Any]
) -> None:
    columns = [*answers.items(), *others.items()]
    orders = list(itertools.permutations(columns)) if len(columns) < 6 else [columns, columns[::-1]]
    rows = load(tmp_path, [dict(order) for order in orders])
    assert [texts_of(rows, row) for row in range(len(rows))] == [PAIR] * len(orders)


def test_the_worse_answers_are_no_texts_that_the_model_does_not_see(tmp_path: Path) -> None:
    texts = {"chosen": "it is seven, since three and four are.", "rejected": "it is eight, since I think so."}
    longer = {f"response_{name}": text for name, text in texts.items()}
    for row in ({"prompt": SUM, **texts}, {"prompt": SUM, **longer}):
        assert not [note for note in notes_of(lambda row=row: load(tmp_path, [row])) if "does not see" in note]


def test_several_pairs_that_may_be_the_answers_are_refused(tmp_path: Path) -> None:
    several = {**LONGER, "chosen_rationale": "It is right.", "rejected_rationale": "It is wrong."}
    message = (
        r"line 1: 2 pairs of columns may hold the answers: (response_chosen and response_rejected|"
        r"chosen_rationale and rejected_rationale); .* set data.answer_column to the better answers"
    )
    for order in itertools.permutations(several.items()):
        with pytest.raises(DataError, match=message):
            load(tmp_path, [dict(order)])
    assert texts_of(load(tmp_path, [several], answer_column="response_chosen")) == PAIR
    with pytest.raises(DataError, match=r"line 1: there is no pair of answers"):
        load(tmp_path, [{"prompt": SUM, "chosen_model": "gpt", "rejected_model": "llama"}])


@pytest.mark.parametrize(("label", "expected"), [(True, True), (False, False), (1, True), (0, False), ("True", True)])
def test_a_label_is_read_beside_an_answer_of_text_or_messages(tmp_path: Path, label: Any, expected: bool) -> None:
    for prompt, completion in ((SUM, "7"), ([user(SUM)], [model("7")])):
        rows = load(tmp_path, [{"prompt": prompt, "completion": completion, "label": label}], labels=True)
        assert texts_of(rows) == PAIR[:1]
        assert rows[0].chosen == (expected,)


@pytest.mark.parametrize("label", [True, False])
def test_a_label_of_a_conversation_is_that_of_its_last_answer(tmp_path: Path, label: bool) -> None:
    turns = [user(SUM), model("Hm."), user("So?")]
    rows = [{"messages": [*turns, model("7")], "label": label}, {"prompt": turns, "completion": "7", "label": label}]
    of_messages, of_completion = (load(tmp_path, [row], labels=True) for row in rows)
    assert texts_of(of_messages) == texts_of(of_completion)
    assert [learned for _, learned in texts_of(of_messages)] == ["7<|im_end|>"]


def test_margins_are_read_by_pair(tmp_path: Path) -> None:
    pair = {"prompt": SUM, "chosen": "7", "rejected": "8"}
    rows = load(tmp_path, [{**pair, "margin": 2}, {**pair, "margin": 0.5}])
    assert [row.margin for row in rows] == [2.0, 0.5]
    with pytest.raises(DataError, match=r"column 'margin' has a number in 1 of 2 rows: give all rows one"):
        load(tmp_path, [{**pair, "margin": 2}, pair])


@pytest.mark.parametrize(
    ("better", "worse"), [("chosen_rank", "rejected_rank"), ("ranking_chosen", "ranking_rejected")]
)
def test_the_better_answer_has_the_lower_rank(better: str, worse: str, tmp_path: Path) -> None:
    pair = {"prompt": SUM, "chosen": "7", "rejected": "8"}
    assert len(load(tmp_path, [{**pair, better: 1, worse: 3}, {**pair, better: 2, worse: 2}])) == 2
    with pytest.raises(DataError, match=rf"line 1: {better} = 3 is more than {worse} = 1, .* exchange the answers"):
        load(tmp_path, [{**pair, better: 3, worse: 1}])


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("chosen-rating", "rejected-rating"),
        ("reward_chosen", "reward_rejected"),
        ("chosen_avg_rating", "rejected_avg_rating"),
        ("chosenScore", "rejectedScore"),
    ],
)
def test_figures_that_contradict_a_pair_refuse_its_row(better: str, worse: str, tmp_path: Path) -> None:
    pair = {"prompt": SUM, "chosen": "7", "rejected": "8"}
    right = {**pair, better: 4.5, worse: 2}
    wrong = {**pair, better: 2, worse: 4.5}
    assert len(load(tmp_path, [right, {**pair, better: 3, worse: 3}, {**pair, better: None, worse: 2}])) == 3
    with pytest.raises(DataError, match=rf"line 2: {better} = 2 is less than {worse} = 4.5, .* exchange the answers"):
        load(tmp_path, [right, wrong])
    with pytest.raises(DataError, match=rf"line 1: {better} = 3 is less than {worse} = 10"):
        load(tmp_path, [{**pair, better: "3", worse: "10"}])  # as CSV has numbers
    with pytest.raises(DataError, match=r"line 1: scores\.chosen = 2 is less than scores\.rejected = 4.5"):
        load(tmp_path, [{**pair, "scores": {"chosen": 2, "rejected": 4.5}}])
    lengths = {**pair, "chosen_tokens": 2, "rejected_tokens": 9, "rank_chosen": 1, "rank_rejected": 2}
    assert len(load(tmp_path, [lengths])) == 1, "these are no figures of how good an answer is"


def test_pairs_of_equal_scores_are_counted(tmp_path: Path) -> None:
    pair = {"prompt": SUM, "chosen": "7", "rejected": "8"}
    rows = [
        {**pair, "score_chosen": 5, "score_rejected": "5.0", "scores": None},
        {**pair, "score_chosen": 5, "score_rejected": 5, "scores": {"chosen": 2, "rejected": 1}},
        pair,
        {**pair, "scores": {"chosen": 0, "rejected": 0}},
    ]
    notes = notes_of(lambda: load(tmp_path, rows))
    assert [note[:31] for note in notes if "equal scores" in note] == ["2 of 4 pairs have answers of eq"]
    assert not [note for note in notes_of(lambda: load(tmp_path, rows[1:3])) if "equal scores" in note]


def test_a_negative_margin_refuses_its_row(tmp_path: Path) -> None:
    pair = {"prompt": SUM, "chosen": "7", "rejected": "8"}
    with pytest.raises(DataError, match="line 2: column 'margin' holds -1, so that the worse answer would be"):
        load(tmp_path, [{**pair, "margin": 0}, {**pair, "margin": -1}])


GOOD = {"prompt": SUM, "chosen": "7", "rejected": "8"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": SUM, "chosen": "7"}, "there is no pair of answers: expected the columns chosen and rejected; the col"),
    ({"prompt": SUM, "answer": "7"}, "there is no pair of answers: expected the columns chosen and rejected; the col"),
    ({"prompt": SUM, "completion": "7", "label": True}, "labels are learned by podium train dpo --algorithm.loss kto"),
    (
        {"chosen": "7", "rejected": "8"},
        "column 'chosen' holds '7' .str., and there is no column 'prompt'; set data.pro",
    ),
    ({**GOOD, "rejected": None}, "column 'rejected': there is no answer to learn"),
    ({**GOOD, "chosen": [user("7")]}, "column 'chosen' ends with a message of the role 'user'; expected the assistant"),
    ({**GOOD, "chosen": {"a": 1}}, "column 'chosen'.*neither text nor messages"),
    ({**GOOD, "prompt": 3}, "column 'prompt' holds '3' .int.; expected text, or a list of messages"),
    ({**GOOD, "margin": "large"}, "column 'margin' holds 'large' .str.; expected a finite number"),
    ({**GOOD, "margin": True}, "column 'margin' holds 'True' .bool.; expected a finite number"),
    (
        {"chosen": [user(SUM), model("7")], "rejected": [user("Another?"), model("8")]},
        "the conversations in 'chosen' and 'rejected' have no common beginning before an answer",
    ),
    (
        {"prompt": SUM, "chosen": [user(SUM), model("7")], "rejected": [user("Another?"), model("8")]},
        "column 'rejected' begins with a message of the role 'user' that is not the prompt in column 'prompt'",
    ),
    (
        {**GOOD, "chosen": [{**model("7"), "content": [{"type": "image"}]}]},
        "column 'chosen' has a part of the type 'im",
    ),
    ({**GOOD, "rejected": "<|image|>\ud800"}, "half of a surrogate pair"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_a_malformed_row_is_refused_by_its_place_or_left_out(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [GOOD, row, {**GOOD, "chosen": "9"}]
    with pytest.raises((ConfigError, DataError), match=rf"rows\.jsonl, line 2.*{message}") as refused:
        load(tmp_path, rows)
    assert "data.bad_rows = drop leaves such rows out" in str(refused.value)
    heard: list[str] = []
    unsubscribe = subscribe(lambda event: heard.append(event.text) if isinstance(event, Note) else None)
    try:
        kept = load(tmp_path, rows, bad_rows="drop")
    finally:
        unsubscribe()
    assert [kept.examples[at].answer for at in range(len(kept))] == ["7", "9"]
    assert any("cannot be used and is left out" in text and "line 2" in text for text in heard)


@pytest.mark.parametrize("label", ["good", None, 2, [True]])
def test_a_label_that_is_none_is_refused(tmp_path: Path, label: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: column 'label' holds .*; expected true"):
        load(tmp_path, [{"prompt": SUM, "completion": "7", "label": label}], labels=True)


def test_pairs_that_teach_nothing_are_left_out_and_told(tmp_path: Path) -> None:
    heard: list[str] = []
    unsubscribe = subscribe(lambda event: heard.append(event.text) if isinstance(event, Note) else None)
    try:
        kept = load(tmp_path, [GOOD, {**GOOD, "rejected": "7"}])
    finally:
        unsubscribe()
    assert len(kept) == 1
    assert "1 of 2 pairs has two equal answers and is left out: they teach nothing" in heard


def test_a_prompt_column_that_is_not_there_is_answered_by_the_nearest(tmp_path: Path) -> None:
    message = (
        r"line 1: no column 'promt' for the prompt; the columns are .*; did you mean prompt\?; set data\.prompt_column"
    )
    with pytest.raises(DataError, match=message):
        load(tmp_path, [GOOD], prompt_column="promt")


def test_what_is_counted_by_answer_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2, column 'rejected': .*\(2 of the first 6 answers cannot be used"):
        load(tmp_path, [GOOD, {**GOOD, "rejected": None}, {**GOOD, "chosen": None}])
    heard: list[str] = []
    unsubscribe = subscribe(lambda event: heard.append(event.text) if isinstance(event, Note) else None)
    try:
        load(tmp_path, [GOOD, {**GOOD, "prompt": SUM * 9}], max_prompt_tokens=90)
    finally:
        unsubscribe()
    assert "prompts too long: 2 dropped, 0 cut, of 4 answers" in heard


def test_labels_and_pairs_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 of 2 rows is an answer with a label, and the others are pairs"):
        load(tmp_path, [GOOD, {"prompt": SUM, "completion": "7", "label": True}], labels=True)


def test_rows_are_taken_with_their_answers(tmp_path: Path) -> None:
    rows = load(tmp_path, [{**GOOD, "chosen": str(n)} for n in (1, 2, 3)])
    taken = rows.take([2, 0])
    assert [texts_of(taken, at)[0][1] for at in (0, 1)] == ["3<|im_end|>", "1<|im_end|>"]
    assert taken.row_lengths == [sum(len(ids) for ids, _ in row.answers) for row in taken]
    assert taken.longest == [max(len(ids) for ids, _ in row.answers) for row in taken]


def test_labels_of_one_kind_and_contradictions_are_told(tmp_path: Path) -> None:
    good, bad = ({"prompt": SUM, "completion": text, "label": text == "7"} for text in ("7", "8"))
    assert notes_of(lambda: load(tmp_path, [good, bad], labels=True)) == []
    (note,) = notes_of(lambda: load(tmp_path, [good, {**good, "completion": "77"}], labels=True))
    assert note == "all 2 answers have the label true: answers of both labels are needed"
    (note,) = notes_of(lambda: load(tmp_path, [good, bad, {**good, "label": False}], labels=True))
    assert note == "1 answer or pair is the better one in one row, and the worse one in another"
    swapped = {**GOOD, "chosen": GOOD["rejected"], "rejected": GOOD["chosen"]}
    (note,) = notes_of(lambda: load(tmp_path, [GOOD, GOOD, swapped]))
    assert note.startswith("1 answer or pair is the better one in one row")
    assert notes_of(lambda: load(tmp_path, [GOOD, {**GOOD, "chosen": "9"}])) == []


class CountedId(int):
    """A token id that counts how often it was compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("prompts", [[7] * 500, [7] * 499 + [8], [1, 1, 2, 1, 3, 3]])
def test_answers_are_put_after_other_prompts_in_time_that_grows_with_their_number(prompts: list[int]) -> None:
    """Held-out answers to one prompt were compared with one another, each with all."""
    answers = [([CountedId(prompt), 100 + place], [False, True]) for place, prompt in enumerate(prompts)]
    CountedId.compared = 0
    made = [(int(ids[0]), ids[1]) for ids, _ in _mismatch(answers, None)]
    assert CountedId.compared <= 4 * len(prompts)
    around = [*enumerate(prompts)] * 2
    expected = [
        next(((prompt, 100 + other) for other, text in around[place + 1 :] if text != prompt), None)
        for place, prompt in enumerate(prompts)
    ]
    assert made == [pair for pair in expected if pair is not None]
