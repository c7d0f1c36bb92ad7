"""Several completions of one request: all are recorded, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from podium.errors import GenerationError
from podium_agents.service.service import Service
from tests.unit.rollout.service.scripted import TOKEN, USER, posted, scripted

pytest.importorskip("uvicorn")

LOST = GenerationError("the generator is lost")


def asked(service: Service, **more: Any) -> tuple[int, str]:
    from podium_serve.app import make_app
    from podium_serve.server import Server

    with Server(make_app(service, TOKEN)) as server:
        return posted(f"{server.url}/sessions/s/v1/chat/completions", {"messages": [USER], "n": 3, **more})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answers", [("A.<|im_end|>", None, LOST), (LOST, None, "A.<|im_end|>")])
def test_when_one_fails_the_others_end_and_none_is_recorded(answers: Any, stream: bool) -> None:
    service, source, _ = scripted(*answers)
    status, answer = asked(service, stream=stream)
    assert status == (200 if stream else 500)
    assert "the generator is lost" in answer
    assert source.cancelled == 1
    assert (service.sessions["s"].calls, service.sessions["s"].rows) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
def test_all_are_recorded_in_their_order(stream: bool) -> None:
    service, _, tokenizer = scripted("A longer one.<|im_end|>", "B.<|im_end|>", "C.<|im_end|>")
    status, answer = asked(service, stream=stream)
    said = ["", "", ""]
    if stream:
        for line in answer.splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                said[choice["index"]] += choice["delta"].get("content") or ""
    else:
        said = [choice["message"]["content"] for choice in json.loads(answer)["choices"]]
    assert (status, said) == (200, ["A longer one.", "B.", "C."])
    session = service.sessions["s"]
    recorded = [tokenizer.decode(row.ids[row.turns[0].start : row.turns[0].stop]) for row in session.rows]
    assert recorded == [f"{text}<|im_end|>" for text in said]
