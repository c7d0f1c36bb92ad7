"""Reward functions in whichever form people have them: each scores a right answer with 1, or is refused by name.

What must never happen is that a function runs, and scores a right answer with 0 because it gets something else than it
asks for.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.rewards import Grader, RewardConfig
from podium.rewards.call_forms import EXTRAS, Item
from podium.rewards.reward_functions import Result, RewardFunctions, call_rewards

ROW: dict[str, Any] = {"prompt": "2 - 1 =", "answer": "1", "info": {"gold": "1"}, "difficulty": 3.0}
COMPLETION = "1"


def score_of(reward: Any, row: Mapping[str, Any] = ROW, **extras: Any) -> Result:
    return call_rewards(RewardFunctions([reward], columns=frozenset(row)), Item(COMPLETION, row, extras))


class Plain:
    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion == row["answer"])

    def by_column(self, completion: str, answer: str) -> float:
        return float(completion == answer)

    @staticmethod
    def static(completion: str, answer: str) -> float:
        return float(completion == answer)

    @classmethod
    def of_class(cls, completion: str, row: Any) -> float:
        return float(completion == row["answer"])


@dataclass
class Data:
    bonus: float = 0.0

    def __call__(self, text: str, row: Mapping[str, Any]) -> float:
        return float(text == row["answer"]) + self.bonus


class NeedsArgument:
    def __init__(self, path: str) -> None: ...

    def __call__(self, completion: str, row: Any) -> float:
        return 0.0


def wrap(function: Callable[..., Any], *, well: bool) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.wraps(function)(wrapper) if well else wrapper


def with_gold(completion: str, row: Mapping[str, Any], gold: str | None = None) -> float:
    return float(completion == (gold or row["answer"]))


def two(completion: str, gold: str) -> float:
    return float(completion == gold)


RIGHT: dict[str, Any] = {
    "row": lambda completion, row: float(completion == row["answer"]),
    "other first name": lambda c, row: float(c == row["answer"]),
    "swapped": lambda row, completion: float(completion == row["answer"]),
    "column": lambda completion, answer: float(completion == answer),
    "two columns": lambda response, answer, difficulty: float(response == answer and difficulty == 3.0),
    "column by keyword": lambda completion, *, answer: float(completion == answer),
    "column with default": lambda completion, answer="other": float(completion == answer),
    "all by keyword": lambda *, completion, row: float(completion == row["answer"]),
    "prompt first": lambda prompt, completion, answer: float(completion == answer and prompt == ROW["prompt"]),
    "completion alone": lambda text: float(text == "1"),
    "one letter alone": lambda x: float(x == "1"),
    "rest": lambda completion, **kwargs: float(completion == kwargs["answer"]),
    "verifiers' names": lambda completion, answer, **kwargs: float(completion == answer),
    "mapping column": lambda completion, info: float(completion == info["gold"]),
    "example": lambda completion, example: float(completion == example["answer"]),
    "row with a default that is a column": lambda completion, row, difficulty=1.0: float(difficulty == 1.0),
    "length": lambda completion, longest=5: float(len(completion) < longest),
    "unused": lambda _completion, _row: 1.0,
    "anything": lambda *_: 1.0,
    "builtin": len,
    "object": Plain(),
    "class": Plain,
    "dataclass": Data(),
    "class of a dataclass": Data,
    "method": Plain().by_column,
    "static method": Plain.static,
    "class method": Plain.of_class,
    "partial with a keyword": functools.partial(with_gold, gold="1"),
    "partial of a foreign name": functools.partial(two, gold="1"),
    "partial with a position": functools.partial(two, "1"),
    "well decorated": wrap(lambda completion, answer: float(completion == answer), well=True),
}
exec(
    """
def positional(completion, answer, /): return float(completion == answer)
def annotated(c: str, r: dict) -> float: return float(c == r["answer"])
def annotated_late(c: str, r: "Mapping[str, object]") -> float: return float(c == r["answer"])
def verl(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)
def verl_defaults(data_source=None, solution_str="", ground_truth="", extra_info=None):
    return float(solution_str == ground_truth)
def verl_order(solution_str, extra_info, ground_truth, data_source): return float(solution_str == ground_truth)
def verl_rest(solution_str, ground_truth, **kwargs): return float(solution_str == ground_truth and not kwargs)
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **options):
    return [float(s == g and e == {}) for s, g, e in zip(solution_strs, ground_truths, extra_infos)]
def verl_batch_column(solution_strs, answer): return [float(s == a) for s, a in zip(solution_strs, answer)]
def trl(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
def trl_default(prompts, completions, answer=None): return [float(c == a) for c, a in zip(completions, answer)]
async def waits(completion, answer): return float(completion == answer)
async def trl_waits(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
""",
    globals(),
)
RIGHT |= {
    name: globals()[name]
    for name in (
        *("positional", "annotated", "annotated_late", "verl", "verl_defaults", "verl_order", "verl_rest"),
        *("trl", "trl_default", "waits", "trl_waits", "verl_batch", "verl_batch_column"),
    )
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_scores_one(name: str) -> None:
    result = score_of(RIGHT[name])
    assert result.score == 1.0, result.problem


def of_batch(data: DataProto) -> Any:  # type: ignore[name-defined] # noqa: F821 # verl's
    raise NotImplementedError


WRONG: dict[str, tuple[Any, str]] = {
    "gold": (two, "'gold' is neither"),
    "expected": (lambda output, expected: 0.0, "'expected' is neither"),
    "gt": (lambda text, gt: 0.0, "'gt' is neither"),
    "label": (lambda prediction, label: 0.0, "'label' is neither"),
    "reference": (lambda pred, reference: 0.0, "'reference' is neither"),
    "default of None": (lambda completion, gold=None: 0.0, "'gold' is neither"),
    "default of no text": (lambda completion, gold="": 0.0, "'gold' is neither"),
    "default of no list": (lambda completion, golds=[]: 0.0, "'golds' is neither"),
    "default of no tuple": (lambda completion, golds=(): 0.0, "'golds' is neither"),
    "default of no mapping": (lambda completions, facts={}: [0.0], "'facts' is neither"),
    "row alone": (lambda row: 0.0, "'row' is the row, and no parameter is known to be the completion"),
    "row alone by another name": (
        lambda example: 0.0,
        "'example' is the row, and no parameter is known to be the compl",
    ),
    "mapping of functions": ({"right": with_gold}, "is of type dict: expected a function, or a list of functions"),
    "number": (3, "the reward 3 is of type int"),
    "answer first": (lambda answer, target: 0.0, "'answer' is a column of the data"),
    "answer and row": (lambda answer, row: 0.0, "'answer' is a column of the data"),
    "one letters": (lambda c, r: 0.0, "'c' is neither"),
    "ART": (lambda trajectory, scenario: 0.0, "'trajectory' is neither"),
    "slime": (lambda args, sample, **kwargs: 0.0, "'args' is neither"),
    "OpenRLHF": (lambda queries, prompts, labels, **kwargs: {"rewards": [0.0]}, "'queries' is neither"),
    "TRL with a foreign column": (lambda completions, solution, **kwargs: [0.0], "'solution' is neither"),
    "TRL with a default": (lambda completions, solution=None, **kwargs: [0.0], "'solution' is neither"),
    "AReaL": (
        lambda prompt, completions, prompt_ids, completion_ids, answer: 0.0,
        "whose lists are prompts, completions",
    ),
    "verl by batches, with a foreign name": (lambda solution_strs, golds: [0.0], "'golds' is neither"),
    "verl's reward manager": (
        lambda data, return_dict=False: 0.0,
        "is verl's batch, as a reward manager gets it: give",
    ),
    "verl's reward function": (of_batch, "is verl's batch, as a reward manager gets it: give the function"),
    "TRL's environments": (lambda completions, environments: [0.0], "environments, which only TRL"),
    "verl with a router": (lambda solution_str, ground_truth, reward_router_address: 0.0, "'reward_router_address'"),
    "method of no object": (Plain.by_column, "'self' is the object of a method: give the method of an object"),
    "class with an argument": (NeedsArgument, "is a class"),
    "nothing": (lambda: 1.0, "does not say what it takes"),
    "badly decorated": (wrap(two, well=False), "functools.wraps"),
    "without a signature": (max, "no signature that Python can read"),
    "operator": (operator.eq, "'a' is neither"),
    "type": (float, "is a class"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_nobody_can_give_is_refused_by_its_name(name: str) -> None:
    reward, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        RewardFunctions([reward], columns=frozenset(ROW))
    assert message in str(caught.value)


def test_the_refusal_names_function_file_line_parameter_and_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        RewardFunctions([two], columns=["answer", "prompt"])
    line = two.__code__.co_firstlineno
    text = str(caught.value)
    assert (
        f"the reward two (tests/unit/rewards/test_call_forms.py, line {line}) has the signature (completion: " in text
    )
    assert "(which are answer, prompt)" in text
    assert 'write `def two(completion, row)` and read row["answer"] in it' in text
    assert "`def two(completion, answer)`" in text


def test_a_name_that_may_be_the_row_or_its_column_is_refused() -> None:
    reward = RIGHT["example"]
    assert score_of(reward).score == 1.0
    with pytest.raises(ConfigError, match="'example', which may be the row or its column 'example'"):
        RewardFunctions([reward], columns=["prompt", "answer", "example"])

    def as_text(completion: str, example: str) -> float:
        return float(completion == example)

    with pytest.raises(ConfigError, match="'example' is neither"):
        RewardFunctions([as_text], columns=["prompt", "answer"])


def test_a_grader_checks_the_columns_of_its_first_rows_before_it_scores_anything() -> None:
    for in_script in (False, True):
        grader = Grader(RewardConfig(processes=1), reward=two, in_script=in_script)
        with grader, pytest.raises(ConfigError, match="'gold' is neither"):
            grader.grade(["1", "1"], [{"answer": "1", "gold": "1"}, {"answer": "1"}])
    with Grader(RewardConfig(processes=1), reward=two) as grader:
        grader.start()
        with pytest.raises(RewardError, match=r"raised ConfigError: .*'gold' is neither"):
            grader.grade(["1"], [{"answer": "1"}])


def test_rows_may_differ_in_columns_that_have_a_default() -> None:
    functions = RewardFunctions([RIGHT["column with default"]], columns=["prompt"])
    assert call_rewards(functions, Item("1", {"prompt": "", "answer": "1"})).score == 1.0
    assert call_rewards(functions, Item("other", {"prompt": ""})).score == 1.0


@pytest.mark.parametrize(
    ("row", "score"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": "1"}, "answer": "2"}, 1.0),
        ({"ground_truth": "1", "answer": "2"}, 1.0),
        ({"answer": "1"}, 1.0),
        ({"reward_model": {"style": "rule"}, "answer": "1"}, 1.0),
    ],
)
def test_verls_ground_truth_is_where_verl_has_it(row: dict[str, Any], score: float) -> None:
    assert score_of(RIGHT["verl"], {"data_source": "sums", **row}).score == score


def test_verls_other_arguments_and_what_it_returns() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.append((data_source, extra_info))
        return {"score": 1.0, "acc": True, "pred": solution_str, "unknown": None}

    row = {"data_source": "sums", "prompt": [], "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 3}}
    result = score_of(compute_score, row)
    assert seen == [("sums", {"index": 3})]
    assert (result.score, result.parts, result.extra) == (1.0, {"acc": 1.0}, {"pred": "1"})
    assert RewardFunctions([compute_score], columns=["answer"]).notes == [
        "the data have no column data_source, so the reward compute_score gets None for it"
    ]
    batch: Any = lambda data_sources, solution_strs: [{"score": 0.5, "acc": 1}]  # noqa: E731
    assert score_of(batch, row).parts == {"acc": 1.0}
    assert [note.partition(" ")[0] for note in RewardFunctions([batch], columns=["answer"]).notes] == ["the", "the"]
    assert "returned 0.5 for a list of one completion" in score_of(lambda solution_strs, answer: 0.5).problem
    with pytest.raises(ConfigError, match="verl's signature, and the rows have no ground truth"):
        RewardFunctions([compute_score], columns=["prompt"])
    assert "no reward_model.ground_truth" in score_of(compute_score, {"prompt": "", "answer": None}).problem


def test_verls_form_of_a_batch_has_lists_of_one_of_the_run_and_of_columns() -> None:
    seen: list[Any] = []

    def batch(solution_strs: Any, completion_ids: Any, trainer_state: Any, prompts: Any) -> list[float]:
        seen.append((completion_ids, trainer_state.global_step, prompts))
        return [1.0]

    row = {"prompt": "", "prompts": "a", "completion_ids": [9], "trainer_state": 8, "data_source": "sums"}
    extras = {"completion_ids": [1, 2], "trainer_state": 3}
    functions = RewardFunctions([batch], columns=row.keys())
    assert call_rewards(functions, Item("1", row, extras)).score == 1.0
    assert seen == [([[1, 2]], 3, ["a"])]
    names = [
        name for name in row for note in functions.notes if f"gets the {name} of the run, and not the column" in note
    ]
    assert names == ["completion_ids", "trainer_state"]
    with pytest.raises(ConfigError, match="'completion' is neither the completion, the row nor a column") as caught:
        RewardFunctions([lambda solution_strs, answer, completion: [0.0]], columns=["answer"])
    assert "TRL" not in str(caught.value)


def test_what_the_trainer_knows_is_given_where_a_signature_asks_for_it() -> None:
    def by_row(completion: str, completion_ids: list[int], prompt_ids: list[int]) -> float:
        return float(len(completion_ids) + 10 * len(prompt_ids))

    def by_state(completion: str, row: Any, trainer_state: Any) -> float:
        return trainer_state.global_step / trainer_state.max_steps

    def in_rest(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in kwargs["completion_ids"]]

    extras: dict[str, Any] = {"completion_ids": [5, 6], "prompt_ids": [7], "trainer_state": 3}
    functions = RewardFunctions([by_row, by_state, in_rest], columns=["answer"], steps=4)
    assert functions.extras == {*EXTRAS} - {"max_new_tokens", "stop_text"}
    assert dict(call_rewards(functions, Item("1", {"answer": "1"}, extras)).parts) == {
        "by_row": 12,
        "by_state": 0.75,
        "in_rest": 2,
    }
    assert score_of(by_row).problem == "asks for completion_ids, which a run knows: Grader.grade gets it as extras"
    assert score_of(lambda completion, row, completion_ids=None: float(completion_ids is None)).score == 1.0
    assert RewardFunctions([RIGHT["column"]]).extras == frozenset()


def test_the_rest_of_trls_form_may_be_passed_on() -> None:
    """TRL gives them always, so that a wrapper that names none of them hands them to the function that reads them."""

    def base(completions: Any, completion_ids: Any = None, trainer_state: Any = None, **kwargs: Any) -> list[float]:
        return [-1.0 if None in (completion_ids, trainer_state) else len(completion_ids[0]) + trainer_state.global_step]

    def scaled(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [score / 2 for score in base(completions, **kwargs)]

    assert RewardFunctions([scaled], columns=["answer"]).extras == {"completion_ids", "trainer_state"}
    assert score_of(scaled, completion_ids=[1, 2, 3], trainer_state=5).score == 4.0


def test_a_function_within_a_reward_reads_what_the_trainer_knows() -> None:
    def by_row(completion: str, answer: str, **kwargs: Any) -> float:
        return max((lambda: float(len(kwargs.get("completion_ids") or ())))(), 0.0)

    assert RewardFunctions([by_row], columns=["answer"]).extras == {"completion_ids"}
    assert score_of(by_row, completion_ids=[1, 2]).score == 2.0


def test_the_rest_of_each_form_gets_what_the_trainer_knows() -> None:
    def verl(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> float:
        return -float(len(kwargs["completion_ids"]) > 2)

    def row(completion: str, **kwargs: Any) -> float:
        return -float(len(kwargs.get("completion_ids", ())) > 2)

    for reward in (verl, row):
        assert [score_of(reward, completion_ids=[1] * count).score for count in (2, 3)] == [0.0, -1.0]


def test_a_wrapper_with_its_own_parameters_is_called_by_these() -> None:
    def matches(completion: str, pattern: str) -> float:
        return float(completion == pattern)

    @functools.wraps(matches)
    def wrapper(completion: str, row: Mapping[str, Any]) -> float:
        return matches(completion, row["answer"])

    assert score_of(wrapper).score == 1.0
    assert score_of(functools.lru_cache(RIGHT["column"])).score == 1.0


@pytest.mark.parametrize(
    ("reward", "note"),
    [
        (lambda completion, expected="2": 0.0, "reads nothing of the row, and keeps expected = '2'"),
        (lambda completion, target=0.0: 0.0, "reads nothing of the row, and keeps target = 0.0"),
        (lambda completion, row, difficulty=1.0: 0.0, "its parameter difficulty keeps its default 1.0, and not the"),
        (lambda completion, row: float(row.get("gold") == completion), "reads 'gold' of row, and some rows"),
        (lambda completion, row: float(row["gold"] == completion), "reads 'gold' of row, and some rows"),
        (lambda completion, example: sum(example["answers"] == x for x in completion), "reads 'answers' of example"),
        (lambda completion, **kwargs: float(kwargs.get("gold", "") == completion), "reads 'gold' of kwargs, and some"),
        (
            lambda completions, **others: [float(others.get("solution") == c) for c in completions],
            "reads 'solution' of",
        ),
        (lambda solution_str, ground_truth, **kwargs: float(kwargs.get("strict", 0)), "reads 'strict' of kwargs, and"),
    ],
)
def test_what_a_function_reads_that_the_data_do_not_have_is_noted(reward: Any, note: str) -> None:
    """Such a function would score 0 for ever, without an error."""
    (line,) = [
        line
        for line in RewardFunctions([reward], columns=frozenset(ROW)).notes
        if "takes lists" not in line and "data_sou" not in line
    ]
    assert note in line
    assert "tests/unit/rewards/test_call_forms.py, line" in line


@pytest.mark.parametrize("name", RIGHT)
def test_what_reads_the_data_is_not_noted(name: str) -> None:
    notes = RewardFunctions([RIGHT[name]], columns=frozenset(ROW)).notes
    expected = {"length": 1, "row with a default that is a column": 1}
    assert len([note for note in notes if "takes lists" not in note and "data_source" not in note]) == expected.get(
        name, 0
    )


def test_what_a_function_changes_is_seen_by_no_other_function_and_completion() -> None:
    def spoil(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        prompts[0].append({"role": "user", "content": "more"})
        kwargs["tags"][0].clear()
        return [float(len(prompts[0]))]

    def take(completion: str, row: dict[str, Any], completion_ids: list[int]) -> float:
        completion_ids.clear()
        return float(row.pop("answer") == completion) + len(row["prompt"]) + len(row["tags"])

    def count(completion: str, completion_ids: list[int]) -> float:
        return float(len(completion_ids))

    row = {"prompt": [{"role": "user", "content": "3+4?"}], "answer": "7", "tags": ["a"]}
    with Grader(RewardConfig(), reward=[spoil, take, count], in_script=True) as grader:
        grades = grader.grade(["7"] * 2, [row] * 2, extras=[{"completion_ids": [1, 2]}] * 2)
    assert [grade.parts for grade in grades] == [{"spoil": 2.0, "take": 3.0, "count": 2.0}] * 2
    assert row == {"prompt": [{"role": "user", "content": "3+4?"}], "answer": "7", "tags": ["a"]}


def test_a_column_that_the_run_has_a_value_for_is_told() -> None:
    def score(completion: str, answer: str, max_new_tokens: int) -> float:
        return float(completion == answer) / max_new_tokens

    (note,) = RewardFunctions([score], columns=["answer", "max_new_tokens"]).notes
    assert note.endswith("gets the max_new_tokens of the run, and not the column of this name")
    (note, _) = RewardFunctions([lambda completions, **rest: [1.0]], columns=["answer", "completions"]).notes
    assert note.endswith("gets the completions of the run, and not the column of this name")
    assert RewardFunctions([score], columns=["answer"]).notes == []
