"""A service that scores, by an HTTP server on this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.rewards import Grade, Grader, RewardConfig

ask_service = pytest.importorskip("podium_rewards").ask_service

Reply = Callable[[list[Any]], Any]


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[Any]]]:
    """A service that answers what ``reply`` makes of the items: JSON, or a status. Gives its address and what came."""
    came: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            came.append((self.headers.get("Authorization"), body["items"]))
            answer = reply(body["items"])
            text = json.dumps({"error": "no"} if isinstance(answer, int) else answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *_: Any) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/score", came
        finally:
            server.shutdown()
            thread.join()


def grade(reward: Any, completions: list[str], **config: Any) -> list[Grade]:
    with Grader(RewardConfig(time_limit_s=1000, **config), reward=reward, in_script=True) as grader:
        return grader.grade(completions, [{"prompt": "?", "level": number} for number in range(len(completions))])


def test_completions_are_sent_in_batches_and_get_their_own_scores() -> None:
    with serving(lambda items: {"scores": [float(len(item["completion"])) for item in items]}) as (url, came):
        grades = grade(ask_service(url, batch=4, gather_s=0.5, columns=["level"]), ["x" * n for n in range(10)])
    assert [result.score for result in grades] == [float(n) for n in range(10)]
    assert sorted(len(items) for _, items in came) == [2, 4, 4]
    assert {*came[0][1][0]["row"]} == {"level"}


def test_a_score_may_have_parts_and_may_be_none() -> None:
    def reply(items: list[Any]) -> Any:
        return {"scores": [{"score": 0.5, "style": 0.25, "why": "short"} if i["completion"] else None for i in items]}

    with serving(reply) as (url, _):
        first, second = grade(ask_service(url), ["a", ""])
    assert (first.score, dict(first.parts)["style"], first.extra["why"]) == (0.5, 0.25, "short")
    assert second.abstained


def test_a_service_that_is_busy_is_asked_again() -> None:
    tries: list[int] = []

    def reply(items: list[Any]) -> Any:
        tries.append(1)
        return 503 if len(tries) < 3 else {"scores": [1.0] * len(items)}

    with serving(reply) as (url, _):
        assert grade(ask_service(url), ["a"])[0].score == 1.0
    assert len(tries) == 3


@pytest.mark.everyday("said4-'good' is no score", "401-status 401: its key is wrong", "said3-gives no answer like")
@pytest.mark.parametrize(
    ("said", "error"),
    [
        (401, "status 401: its key is wrong"),
        (413, "status 413: lower batch"),
        ({"scores": [1.0]}, r"gives no answer like .*1 score for 2 items"),
        ({"score": 1.0}, "gives no answer like"),
        ({"scores": ["good", "bad"]}, "'good' is no score"),
        ({"scores": [True, False]}, "True is no score"),
    ],
)
def test_an_answer_that_is_none_ends_the_run_with_the_address(said: Any, error: str) -> None:
    with serving(lambda items: said) as (url, _), pytest.raises(RewardError, match=error):
        grade(ask_service(url, retries=0, gather_s=0.5), ["a", "b"])


def test_a_service_that_takes_too_long_or_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(items: list[Any]) -> Any:
        time.sleep(3)
        return {"scores": [1.0]}

    with serving(sleep) as (url, _), pytest.raises(RewardError, match=r"the service at http.* does not answer"):
        grade(ask_service(url, time_limit_s=0.2, retries=1), ["a"])
    with pytest.raises(RewardError, match="does not answer"):
        grade(ask_service("http://127.0.0.1:9/score", retries=0), ["a"])
    monkeypatch.delenv("SCORE_KEY", raising=False)
    with pytest.raises(RewardError, match=r"name it in reward\.env"):
        grade(ask_service("http://127.0.0.1:9/score", api_key="SCORE_KEY"), ["a"])


def test_its_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_KEY", "abc")
    with serving(lambda items: {"scores": [0.0]}) as (url, came):
        grade(ask_service(url, api_key="SCORE_KEY"), ["a"])
    assert came[0][0] == "Bearer abc"


def test_options_and_columns_that_are_wrong_are_refused_before_the_start() -> None:
    for options in ({"batch": 0}, {"retries": -1}, {"columns": "level"}, {"time_limit_s": 0}):
        with pytest.raises(ConfigError, match="ask_service"):
            ask_service("http://127.0.0.1:9", **options)
    with pytest.raises(ConfigError, match="expected an address"):
        ask_service("127.0.0.1:9")
    reward = ask_service("http://127.0.0.1:9", columns=["gold"])
    config = RewardConfig(time_limit_s=1000)
    with (
        pytest.raises(ConfigError, match="'gold'"),
        Grader(config, reward=reward, columns=["prompt"], in_script=True) as grader,
    ):
        grader.start()
    with (
        pytest.raises(ConfigError, match=r"reward\.time_limit_s 183"),
        Grader(reward=ask_service("http://127.0.0.1:9"), columns=["prompt"], in_script=True) as grader,
    ):
        grader.start()
