"""A model as the judge: its scores, its silence, and what is no score, by an HTTP server on this machine."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.rewards import Grade, Grader, RewardConfig

judge = pytest.importorskip("podium_rewards").judge
chat_judge = importlib.import_module("podium_rewards.chat_judge")

Reply = Callable[[str], "str | int"]
ROW = {"prompt": "2 + 2?", "answer": "4"}


@contextmanager
def judging(reply: Reply) -> Iterator[tuple[str, list[Any]]]:
    """A judge that answers what ``reply`` makes of a question: a text, or the status of an error. Gives its address and
    what it was asked."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers.get("Authorization"), body))
            content = reply(body["messages"][-1]["content"])
            status = content if isinstance(content, int) else 200
            answer = {"choices": [{"message": {"content": content}}]} if status == 200 else {"error": "no"}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *_: Any) -> None:
            """Be quiet."""

    with pytest.MonkeyPatch.context() as patch, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        patch.setattr(chat_judge, "PAUSE_S", 0.01)  # it is asked again at once
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
            thread.join()


def grade(reward: Any, completions: list[str], rows: list[Any] | None = None, **config: Any) -> list[Grade]:
    """Grade completions in the script's process, with limits that leave the judge its time."""
    settings = RewardConfig(time_limit_s=1000, **config)
    with Grader(settings, reward=reward, in_script=True) as grader:
        return grader.grade(completions, rows or [ROW] * len(completions))


def count_digits(question: str) -> str:
    """The score of the only answer."""
    answer = question.partition("<answer 1>\n")[2].partition("\n</answer 1>")[0]
    return f'Hm. {{"score": 1}}? No: {{"why": "digits", "score": {sum(c.isdigit() for c in answer) / 10}}} That is all.'


def test_each_completion_has_the_score_that_the_judge_ends_with() -> None:
    with judging(count_digits) as (url, requests):
        grades = grade(judge("Count digits.", url=url, model="m", body={"temperature": 0}), ["12", "x", "12"])
    assert [result.score for result in grades] == [0.2, 0.0, 0.2]
    path, key, body = requests[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", None, "m", 0)
    assert "Count digits." in body["messages"][0]["content"] and "2 + 2?" in body["messages"][1]["content"]


def test_the_judge_reads_the_system_message_of_a_row_and_the_only_one_of_its_answers() -> None:
    with judging(count_digits) as (url, requests):
        grade(judge(url=url, model="m"), ["12"], [{"prompt": "2 + 2?", "system": "Be brief.", "answer": ["4"]}])
    question = requests[0][2]["messages"][1]["content"]
    assert "Be brief." in question and "2 + 2?" in question and "<reference>\n4\n</reference>" in question


def test_a_system_message_that_a_template_wrote_is_shown_once() -> None:
    with judging(count_digits) as (url, requests):
        grade(
            judge(url=url, model="m"), ["12"], [{"prompt": "Be brief.\n2 + 2?", "system": "Be brief.", "answer": "4"}]
        )
    assert requests[0][2]["messages"][1]["content"].count("Be brief.") == 1


def test_an_answer_is_asked_for_once_also_by_a_later_run(tmp_path: Path) -> None:
    file = str(tmp_path / "judged.jsonl")
    with judging(count_digits) as (url, requests):
        for completions in (["1"], ["1", "2", "1"]):
            grade(judge(url=url, model="m", cache=file), completions)
        with open(file, "a", encoding="utf-8") as unfinished:
            unfinished.write('["half')
        grade(judge(url=url, model="m", cache=file), ["2"])
        assert len(requests) == 2
        grade(judge(url=url, model="another", cache=file), ["1"])
    assert len(requests) == 3


VALUES = ('"high"', "1.5", "NaN", "true", "null", "-0.1", "[0.5]")
NO_SCORES = ["", "I would say 7.", "[0.5]", '{"scores": [0.5]}', *(f'{{"score": {value}}}' for value in VALUES)]


@pytest.mark.parametrize("answer", NO_SCORES)
def test_an_answer_without_a_score_leaves_the_completion_out_and_is_never_zero(answer: str) -> None:
    with judging(lambda question: answer) as (url, requests):
        (result,) = grade(judge(url=url, model="m", retries=1), ["4"], failure_score=0.0)
    assert result.abstained and result.score != result.score
    assert result.extra["judge"].startswith("no score: ")
    assert len(requests) == 2


CRITERIA = '[{"name": "clarity", "score": 10}, {"name": "style", "score": 2}]'


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (f'{{"score": 9, "criteria": {CRITERIA}}}', 9),
        (f'{{"criteria": {CRITERIA}, "score": 9}}', 9),
        ('{"criteria": {"clarity": {"score": 10}, "style": {"score": 2}}, "score": 9}', 9),
        (f'Clear.\n```json\n{{\n  "score": 9,\n  "criteria": {CRITERIA}\n}}\n```\nThat is all, {{really}}.', 9),
        ('{"score": 3}? No: {"score": 9}', 9),
        ('{"score": 9} as {"sum": 12, "parts": [{"score": 2}]} has it', 9),
        ('{"score": 9, "why": "it says {\\"score\\": 2} and }"}', 9),
        ('The form is {"score": S}, and not {"scores": [S, ...]}. {"score": 9}', 9),
        ('{"score": 9} and {"scores": [1]}', 9),
        ('The set {a, b}, \\frac{1}{2} and a stray { or "{" or [ of the answer. {"score": 9}', 9),
        ("It has the code `f = {x: 1` and `switch { default: f();`. " + '{"score": 9}', 9),
        ('[{"score": 9}]', 9),
        ('{{"score": 9}}', 9),
        ("[1] and [2]: " + '{"score": 9} [3]', 9),
        ('{"why": "' + "{" * 50 + '", "score": 9}', 9),
        ('The answer begins {"name": "Ada", but it is cut off.\n{"score": 9}', 9),
        ('It has \\{a: "b\\} in it.\n```json\n{"score": 9}\n```', 9),
    ],
)
def test_the_score_is_that_of_the_last_outermost_object(text: str, score: float) -> None:
    assert judge(url="http://x/v1", model="m", scale=(0, 10))._read(text, 1) == [score]


@pytest.mark.parametrize(
    "text",
    [
        f'{{"score": 9, "criteria": {CRITERIA}',
        f'{{"score": 9, "criteria": {CRITERIA[:-3]}',
        f'```json\n{{"criteria": {CRITERIA}, "sc',
        f'{{"criteria": {CRITERIA}}}',
        f"{{'score': 9, 'criteria': {CRITERIA}}}",
        f'{{"score": 9, "criteria": {CRITERIA},}}',
        f'{{"why": "is }} right?", "criteria": {CRITERIA},}}',
        f'{{"why": "it said "no" here", "criteria": {CRITERIA}, "score": 9}}',
        f'{{// of ten\n"score": 9, "criteria": {CRITERIA}}}',
        f"{{score: 9, criteria: {CRITERIA}}}",
        f"{{“score”: 9, “criteria”: {CRITERIA}}}",
        CRITERIA,
        CRITERIA[:-1],
        '{"result": {"score": 9}}',
        '{"score": 3} and then {"score": "high"}',
    ],
)
def test_a_score_in_a_larger_answer_is_not_taken_for_the_score(text: str) -> None:
    """No score is better than one of a criterion: the question is asked again."""
    with pytest.raises(ValueError, match=r"no JSON object with 'score' that is in no other|is no number from"):
        judge(url="http://x/v1", model="m", scale=(0, 10))._read(text, 1)


def test_the_scores_of_a_group_are_in_the_last_outermost_object_with_scores() -> None:
    reward = judge(url="http://x/v1", model="m", group=2)
    text = '{"scores": [0.1, 0.9], "parts": [{"scores": [1, 1]}]} and {"score": 0.5}'
    assert reward._read(text, 2) == [0.1, 0.9]
    with pytest.raises(ValueError, match="no JSON object with 'scores'"):
        reward._read('{"parts": [{"scores": [1, 1]}], "score": 0.5}', 2)


def test_a_score_that_an_earlier_release_read_otherwise_is_asked_for_again(tmp_path: Path) -> None:
    """Earlier readings named an entry of the cache by the address, the request and the scale alone."""
    file = tmp_path / "judged.jsonl"
    answer = '{"score": 0.9, "criteria": [{"score": 0.2}]}'
    with judging(lambda question: answer) as (url, requests):
        reward = judge(url=url, model="m", cache=str(file))
        body = {"model": "m", "messages": reward._write(ROW, ["4"])}
        old_name = json.dumps([f"{url}/chat/completions", body, (0.0, 1.0)], sort_keys=True).encode()
        file.write_text(json.dumps([hashlib.sha256(old_name).hexdigest(), [0.2]]) + "\n")
        (result,) = grade(reward, ["4"])
        (again,) = grade(judge(url=url, model="m", cache=str(file)), ["4"])
    assert (result.score, again.score, len(requests)) == (0.9, 0.9, 1)


def test_a_question_is_asked_again_after_a_bad_answer_and_after_an_error() -> None:
    replies: Iterator[str | int] = iter(["nothing", 503, 429, '{"score": 0.5}'])
    with judging(lambda question: next(replies)) as (url, requests):
        (result,) = grade(judge(url=url, model="m", retries=3), ["4"])
    assert (result.score, len(requests)) == (0.5, 4)


@pytest.mark.parametrize(("status", "remedy"), [(401, "reward.env"), (404, "url must end with"), (500, "its own log")])
def test_an_error_of_the_judge_names_its_address_and_the_remedy(status: int, remedy: str) -> None:
    with judging(lambda question: status) as (url, requests), pytest.raises(RewardError) as error:
        grade(judge(url=url, model="m", retries=1), ["4"])
    assert f"{url}/chat/completions" in str(error.value) and str(status) in str(error.value)
    assert remedy in str(error.value)
    assert len(requests) == (2 if status == 500 else 1)


def test_a_judge_that_is_not_there_or_has_no_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with judging(count_digits) as (url, _):
        pass
    with pytest.raises(RewardError, match=rf"the judge at {url}/chat/completions does not answer .*, tried 2 times"):
        grade(judge(url=url, model="m", retries=1), ["4"])
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with judging(count_digits) as (url, requests):
        with pytest.raises(RewardError, match=r"--reward\.env '\[JUDGE_KEY\]'"):
            grade(judge(url=url, model="m", api_key="JUDGE_KEY"), ["4"])
        monkeypatch.setenv("JUDGE_KEY", "k")
        grade(judge(url=url, model="m", api_key="JUDGE_KEY"), ["4"])
    assert [key for _, key, _ in requests] == ["Bearer k"]


def test_a_judge_that_is_silent_is_left_by_its_time_limit() -> None:
    go = threading.Event()

    def wait(question: str) -> str:
        go.wait(60)
        return '{"score": 1}'

    with judging(wait) as (url, _):
        with pytest.raises(RewardError, match=r"does not answer \(TimeoutError"):
            grade(judge(url=url, model="m", retries=0, time_limit_s=0.3), ["4"])
        go.set()


def rank(question: str) -> str:
    """The longest answer is the best one."""
    lengths = [len(part.partition("\n</answer")[0]) for part in question.split("<answer ")[1:]]
    return json.dumps({"scores": [length / (1 + max(lengths)) for length in lengths]})


def test_the_completions_of_a_prompt_are_judged_by_one_question() -> None:
    completions, rows = ["a", "aaa", "aa", "bbbb", "b", "bb"], [ROW] * 3 + [{"prompt": "3 + 3?", "answer": "6"}] * 3
    mixed = [0, 3, 1, 4, 5, 2]
    with judging(rank) as (url, requests):
        reward = judge(url=url, model="m", group=3)
        grades = grade(reward, [completions[at] for at in mixed], [rows[at] for at in mixed])
    by_position = {at: result.score for at, result in zip(mixed, grades, strict=True)}
    assert by_position[0] < by_position[2] < by_position[1] and by_position[4] < by_position[5] < by_position[3]
    assert len(requests) == 2


def test_a_group_that_is_not_whole_is_judged_as_it_came_and_a_wrong_number_of_scores_is_none() -> None:
    with judging(rank) as (url, requests):
        grades = grade(judge(url=url, model="m", group=3, gather_s=0.5), ["a", "aaa"])
    assert grades[0].score < grades[1].score and len(requests) == 1
    with judging(lambda question: '{"scores": [0.1, 0.2, 0.3]}') as (url, requests):
        grades = grade(judge(url=url, model="m", group=2, retries=0), ["a", "aaa"])
    assert all(result.abstained for result in grades)


def test_many_groups_wait_beside_each_other_in_a_process_that_can_be_killed(tmp_path: Path) -> None:
    """More completions than a grading process has at work of other rewards, in an order that ends all groups late."""
    with judging(rank) as (url, requests):
        (tmp_path / "my_judge.py").write_text(
            f"from podium_rewards import judge\nscore = judge(url={url!r}, model='m', group=4, gather_s=120)\n"
        )
        settings = RewardConfig(name=f"{tmp_path}/my_judge.py:score", time_limit_s=1000)
        with Grader(settings) as grader:
            order = [(position, number) for position in range(4) for number in range(40)]
            grades = grader.grade(
                ["x" * (1 + position) for position, _ in order], [{"prompt": str(n)} for _, n in order]
            )
    assert len(requests) == 40
    assert [result.score for result in grades[:40]] == [0.5] * 40


def test_a_limit_that_is_shorter_than_the_judges_own_is_refused() -> None:
    limit = r"reward\.time_limit_s = 5, and the reward Judge .* set --reward\.time_limit_s 183"
    for in_script in (True, False):
        grader = Grader(RewardConfig(), reward=judge(url="http://127.0.0.1:1/v1", model="m"), in_script=in_script)
        with pytest.raises(ConfigError, match=limit), grader:
            grader.grade(["4"], [ROW])
    for wrong in ({"url": "localhost"}, {"model": ""}, {"scale": (1, 1)}, {"group": 0}, {"retries": -1}):
        with pytest.raises(ConfigError, match="judge"):
            judge(**{"url": "http://x/v1", "model": "m", **wrong})  # type: ignore[arg-type]
