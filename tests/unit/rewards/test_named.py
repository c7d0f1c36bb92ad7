"""The rewards that Podium brings, on answers as models and data sets really write them."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from podium.rewards import Grader, RewardConfig, resolve_reward
from podium.rewards.number_parsing import final_number

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("completion", "answer", "exact", "fraction"),
    [
        ("123", "123", 1.0, 1.0),
        (" 123\n", "123", 1.0, 1.0),
        ("129", "123", 0.0, 2 / 3),
        ("1234", "123", 0.0, 3 / 4),
        ("", "123", 0.0, 0.0),
        ("231", "123", 0.0, 0.0),
        ("7", 7, 1.0, 1.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_exact_and_fraction(completion: str, answer: object, exact: float, fraction: float) -> None:
    assert resolve_reward("exact")(completion, {"answer": answer}) == exact
    assert resolve_reward("fraction")(completion, {"answer": answer}) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("name", "completion", "stop_text", "answer", "score"),
    [
        ("exact", "<answer>4", "</answer>", "<answer>4</answer>", 1.0),
        ("exact", "4", "\n\nQuestion:", "4", 1.0),
        ("exact", "4", "2", "4", 1.0),
        ("exact", "5", "</answer>", "<answer>4</answer>", 0.0),
        ("fraction", "<a>4", "</a>", "<a>5</a>", 7 / 8),
        ("fraction", "12", " Question:", "123", 2 / 3),
        ("gsm8k", r"the answer is 3, no: \boxed{4", "}", "4", 1.0),
        ("gsm8k", r"the answer is 4, no: \boxed{3", "} Question 4:", "4", 0.0),
        ("gsm8k", "it is 4.", " Question 2:", "4", 1.0),
        ("gsm8k", "it is 4.", "####", "4", 1.0),
    ],
)
def test_the_text_that_ended_a_completion_is_read_where_it_ends_the_answer(
    name: str, completion: str, stop_text: str, answer: str, score: float
) -> None:
    assert resolve_reward(name)(completion, {"answer": answer}, stop_text) == pytest.approx(score)
    with Grader(RewardConfig(name=name, time_limit_s=60), columns=["answer"], in_script=True) as grader:
        assert grader.extras == {"stop_text"}
        (grade,) = grader.grade([completion], [{"answer": answer}], [{"stop_text": stop_text}])
    assert grade.score == pytest.approx(score)


@pytest.mark.parametrize("name", ["exact", "fraction", "gsm8k"])
def test_a_row_without_an_answer_says_which_setting_to_change(name: str) -> None:
    with pytest.raises(ValueError, match=r"data\.answer_column"):
        resolve_reward(name)("1", {"question": "?"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 72", "72"),
        ("#### $1,234.50 in all, of 3 parts", "1234.50"),
        ("6 #### 5 #### 4", "4"),
        ("####", None),
        ("no number", None),
        ("10-5", None),
        ("5 - 3", None),
        ("5 - 3 = 2", "2"),
        ("it is -5", "-5"),
        ("it is \u22125", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("x=-3", "-3"),
        ("1, 2", "2"),
        ("1,234,567", "1234567"),
        ("50%", "50"),
        (".5", ".5"),
        ("€ 18 per day", "18"),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


PAID = """
1/2|0.5 0.5|1/2 -1/2|-0.5 3 1/2|3.5 3½ hours|3.5 ½|0.5 $\\frac{1}{2}$|0.5 \\frac12|0.5 -\\frac{1}{2}|-0.5 1/2 = 0.5|0.5
10 000|10000 1.234,50|1234.50 1,234,567.89|1234567.89 1'000|1000 1{,}000|1000 1\\,000|1000 0,5|0.5 1.234.567|1234567
4e2|400 5.0e-3|0.005 4 x 10^2|400 4 \\times 10^{2}|400 3 million|3000000 $5M|5000000 10k|10000
42%|42 42\\%|42 42 km/h|42 60/hour|60 42km|42 25 cents|25 90^\\circ|90 Rs. 500|500 100 %|100 3rd|3
42.|42 42!|42 **42**|42 `42`|42 $42$|42 \\$42|42 \\boxed{42}|42 (42)|42 "42"|42 42</answer>|42 ~42|42
x = 42|42 3 + 4 = 7|7 42 = 6*7|42 The answer is 42 apples|42 42 apples, 3 of them red|42 42 (6*7)|42 ٤٢|42 -$5|-5
"""
UNPAID = """
1/2|1 1/2|2 3 1/2|3 3½|3 \\frac{1}{2}|1 \\frac12|12 1/0|1 12/25/2024|12 2024-12-25|2024
10 000|10 1 000 000|1 1.234,50|1.234 1,234|1 1,234|1.234 1_000|1 1.2.3|1.2
4e2|4 4 x 10^2|4 1e400|1 10^3|10 10²|10 10²|102 2**3|23 2**3|2 3 million|3 10k|10 $5M|5
3:45|3 3:45|45 3 hours 45 minutes|3 3 hours and 45 minutes|3 5 feet 3 inches|5 2 and 1/2|2 7 R 2|7
3-5|3 3\u20135|3 3 to 5|3 3, 4|3 3,4,5|3 x=3, y=4|3 12 = 13|12 x=42 or 43|42 1 of 2|1
6*7|6 6 * 7|7 42 + x|42 x - 42|42 2x|2 2π|2 2\\pi|2 2√3|2 \\sqrt{2}|2 \\log 2|2 3i|3 0x1F|0 -42|42 no idea|7
"""


def split_cases(table: str) -> list[tuple[str, str]]:
    """Pairs of what stands behind the mark, and an answer: ``text|answer text|answer``."""
    return re.findall(r"(\S[^|\n]*)\|(\S+)", table)


def test_gsm8k_pays_a_number_in_whichever_way_it_is_written() -> None:
    reward, cases = resolve_reward("gsm8k"), split_cases(PAID)
    assert len(cases) > 50
    assert [case for case in cases if reward(f"so\n#### {case[0]}", {"answer": case[1]}) != 1.0] == []


def test_gsm8k_never_pays_a_part_of_another_number() -> None:
    reward, cases = resolve_reward("gsm8k"), split_cases(UNPAID)
    assert len(cases) > 50
    assert [case for case in cases if reward(f"so\n#### {case[0]}", {"answer": case[1]}) != 0.0] == []


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("The answer is 5.0", "#### 5", 1.0),
        ("Answer: 42. I am 100% sure", "42", 1.0),
        ("The answer is not 42 but 43", "42", 0.0),
        (r"so \boxed{42}, which is 7 more", "42", 1.0),
        (r"so \boxed{1/2}", "1", 0.0),
        ("we meet at 3:45", "45", 0.0),
        ("5 is half of 1/2", "2", 0.0),
        ("5", "2 + 3 = <<2+3=5>>5\n#### 5", 1.0),
        ("$1,000", "#### 1000", 1.0),
        ("0.3333333", "#### 0.33333333", 1.0),
        ("0.3", "#### 0.33", 0.0),
        ("6", "#### 5", 0.0),
        ("I do not know", "#### 5", 0.0),
        ("I think 5. #### 6", "#### 5", 0.0),
    ],
)
def test_gsm8k(completion: str, answer: str, score: float) -> None:
    assert resolve_reward("gsm8k")(completion, {"answer": answer}) == score


def test_gsm8k_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        resolve_reward("gsm8k")("5", {"answer": "five"})


def test_gsm8k_reads_every_answer_of_the_data_set() -> None:
    if not GSM8K.exists():
        pytest.skip("the GSM8K files are not beside the repository (../shared/data/gsm8k)")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    reward = resolve_reward("gsm8k")
    assert len(rows) == 1319
    assert all(reward(row["answer"], row) == 1.0 for row in rows)
    assert all(reward(row["answer"] + "0", row) == 0.0 for row in rows if not row["answer"].endswith("#### 0"))
