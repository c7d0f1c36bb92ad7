"""What a service counts, as Prometheus reads it, of one rank and of several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

from podium_serve.metrics import Metrics, add_line


def asked(*requests: tuple[str, int]) -> str:
    """The metrics of a service that was asked for these paths and answered with these statuses; 0 for none."""
    metrics = Metrics()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert metrics.running == 1
        if scope["status"]:
            await send({"type": "http.response.start", "status": scope["status"]})

    async def nothing(*_: Any) -> Any:
        return None

    run = metrics.measured(app, ["/a", "/b"])

    async def all_of_them() -> None:
        for path, status in requests:
            await run({"type": "http", "path": path, "status": status}, nothing, nothing)

    asyncio.run(all_of_them())
    metrics.tokens.update(prompt=3)
    return metrics.text({"weights_version": ("Version.", 4)})


def samples(text: str) -> Mapping[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def family(line: str) -> str:
    name = line.split()[2] if line.startswith("#") else line.partition("{")[0].split()[0]
    return next((name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)), name)


FIRST = (("/a", 200), ("/sessions/one/a", 400), ("/b", 0))
SECOND = (("/elsewhere", 404), ("/a", 200))


def test_requests_are_counted_by_path_without_its_session_and_by_status() -> None:
    found = samples(asked(*FIRST))
    counts = {name: value for name, value in found.items() if name.startswith("podium_requests_total")}
    head = "podium_requests_total"
    assert counts == {
        f'{head}{{path="/a",code="200"}}': 1,
        f'{head}{{path="/a",code="400"}}': 1,
        f'{head}{{path="/b",code="499"}}': 1,
    }
    buckets = [value for name, value in found.items() if name.startswith('podium_request_seconds_bucket{path="/a"')]
    assert all(low <= high for low, high in pairwise(buckets)) and buckets[-1] == 2
    assert found['podium_request_seconds_count{path="/a"}'] == 2
    assert found["podium_requests_running"] == 0


def test_several_ranks_are_added_in_one_text_with_each_family_once() -> None:
    text = add_line([asked(*FIRST), asked(*SECOND)])
    found = samples(text)
    assert found['podium_requests_total{path="/a",code="200"}'] == 2
    assert found['podium_requests_total{path="other",code="404"}'] == 1
    assert found['podium_tokens_total{kind="prompt"}'] == 6
    assert found["podium_weights_version"] == 4
    families = [name for name, _ in groupby(text.splitlines(), family)]
    assert len(families) == len(set(families)), "the lines of a family stand together"
