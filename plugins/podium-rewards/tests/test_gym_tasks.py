"""Generated tasks: different problems, sides that never meet, and what a mistake says."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from podium.errors import ConfigError, DataError
from podium.rewards import Grader, RewardConfig
from podium.rollout.tasks import DataConfig, Example, load_examples
from podium.telemetry import Event, Note, subscribe

TWO_TERMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def load(config: DataConfig, split: Any = "train", seed: int = 0, limit: int | None = None) -> list[Example]:
    return load_examples(config.train, config, split, seed, limit)


def prompts(examples: list[Example]) -> set[str]:
    return {str(example.prompt) for example in examples}


def test_problems_are_different_and_the_sides_disjoint_over_all_seeds() -> None:
    config = DataConfig(train="reasoning_gym:chain_sum", options=TWO_TERMS, train_items=2000)
    train = [load(config, "train", seed) for seed in range(3)]
    test = [load(config, "test", seed, 300) for seed in range(3)]
    assert [len(prompts(side)) for side in train] == [2000] * 3
    assert [len(prompts(side)) for side in test] == [300] * 3
    assert not set().union(*map(prompts, train)) & set().union(*map(prompts, test))
    assert load(config, "train", 1) == train[1]
    assert len(prompts(train[0]) & prompts(train[1])) < 1000, "neighbouring seeds must not give the same problems"


def test_a_row_is_what_its_scorer_needs() -> None:
    config = DataConfig(train="reasoning_gym:chain_sum", options=TWO_TERMS, train_items=50)
    config_with_template = DataConfig(
        train=config.train, options=TWO_TERMS, train_items=50, prompt_column="{metadata[expression]} ="
    )
    for examples in (load(config), load(config_with_template)):
        with Grader(RewardConfig(name="reasoning_gym")) as grader:
            grades = grader.grade([str(example.answer) for example in examples], [example.row for example in examples])
        assert all(grade.correct for grade in grades)
    assert str(load(config)[0].prompt).startswith("State the final answer")
    first = load(config_with_template)[0]
    assert first.prompt == first.row["metadata"]["expression"] + " ="


@pytest.mark.everyday("propositional_logic")
@pytest.mark.parametrize(
    "task",
    ("leg_counting", "spell_backward", "gcd", "word_ladder", "propositional_logic"),
)
def test_other_tasks_load_and_travel_to_graders(task: str) -> None:
    examples = load(DataConfig(train=f"reasoning_gym:{task}", train_items=20))
    assert len(prompts(examples)) == 20
    with Grader(RewardConfig(name="reasoning_gym")) as grader:
        grades = grader.grade([example.answer or "?" for example in examples], [example.row for example in examples])
    assert all(grade.score > 0.9 for grade, example in zip(grades, examples, strict=True) if example.answer is not None)


def test_a_task_that_is_too_small_says_so() -> None:
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    config = DataConfig(train="reasoning_gym:chain_sum", options=tiny)
    heard: list[Event] = []
    unsubscribe = subscribe(heard.append)
    test = load(config, "test", limit=500)
    unsubscribe()
    train = load(config)
    assert 0 < len(test) < 50
    assert 100 < len(train) + len(test) <= 200, "81 sums and 81 differences of digits without zero, 100 of each with it"
    assert not prompts(train) & prompts(test)
    (note,) = [event.text for event in heard if isinstance(event, Note)]
    assert f"chain_sum has few different problems: {len(test)} held-out problems were found, and 500 are needed" in note
    with pytest.raises(DataError, match="no held-out examples"):
        load(DataConfig(train=config.train, options=tiny, holdout=0.0), "test", limit=500)


def test_another_task_as_held_out_data() -> None:
    config = DataConfig(train="reasoning_gym:gcd", eval="reasoning_gym:lcm", train_items=30)
    assert {example.row["metadata"]["source_dataset"] for example in load(config)} == {"gcd"}
    assert {example.row["metadata"]["source_dataset"] for example in load(config, "test", limit=30)} == {"lcm"}


def test_naming_the_same_task_twice_keeps_the_sides_apart() -> None:
    task = "reasoning_gym:chain_sum"
    config = DataConfig(train=task, eval=task, options=TWO_TERMS, train_items=3000)
    assert not prompts(load(config)) & prompts(load(config, "test", limit=300))


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chainsum", {}, "no task 'chainsum'; did you mean .*reasoning_gym:chain_sum"),
        ("chain_sum", {"min_term": 2}, r"data\.options\.min_term: .* no such option; did you mean min_terms"),
        ("chain_sum", {"seed": 2}, r"data\.options\.seed: .*Podium sets it"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "refuses them: max_terms must be"),
        ("chain_sum", {"min_terms": {1, 2}}, "expected plain values"),
    ],
)
def test_mistakes_are_named(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(DataConfig(train=f"reasoning_gym:{task}", options=options))


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning_gym:gcd needs reasoning-gym.*pip install 'reasoning-gym>=0\.1"):
        load(DataConfig(train="reasoning_gym:gcd"))
