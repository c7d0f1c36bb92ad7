"""A service elsewhere: it opens sessions, asks the model, and rewards them, now or later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
import pytest

from podium.errors import ConfigError
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.config import DataConfig
from podium.trainer.checks.preflight import check_environment
from podium_agents.environments.outside import Outside, is_outside
from podium_agents.environments.resolve import longest_session_s, resolve_environment
from podium_agents.environments.runner import Episode, live
from podium_serve.gateway import Gateway
from tests.unit.rollout.service.scripted import USER, scripted

pytest.importorskip("uvicorn")

TOKEN = "the service's"
OUTSIDE = "podium_agents.environments.outside:Outside"
Act = Callable[[httpx2.AsyncClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODIUM_TOKEN", TOKEN)


def lived(
    act: Act,
    groups: Sequence[int] = (0, 0),
    *,
    limits_s: tuple[float, float, float] = (60.0, 60.0, 60.0),
    at_once: int = 256,
    names_tasks: bool = True,
    held_out: Sequence[int] = (),
) -> list[Episode]:
    """Offer sessions of these groups to a service, which acts beside them. Returns what became of each.

    An evaluation with the groups ``held_out`` begins at the same time. Its sessions are the last.
    """
    service, _, _ = scripted(*["A.<|im_end|>"] * 20)
    service.rules = SamplingParams(max_new_tokens=64)
    calls = [[f"{call}-{number}" for number in range(len(of))] for call, of in (("1-1", groups), ("1-2", held_out))]

    async def run() -> list[Episode]:
        gateway = Gateway()
        offers = gateway.offer(limits_s, TOKEN, names_tasks=names_tasks)
        async with gateway.open(service, "1-1") as address, gateway.open(service, "1-2"):
            limits = SessionLimits(time_limit_s=600.0, at_once=at_once)
            how: Any = {"address": address, "key_of": gateway.keys.key_of, "live_outside": offers.live}
            how["room"] = asyncio.Semaphore(at_once)

            async def live_call(names: Sequence[str], of: Sequence[int], *, is_evaluation: bool) -> list[Episode]:
                rows = [{"prompt": f"row {group}", "answer": "x"} for group in of]
                offers.plan(names, of, rows, is_evaluation=is_evaluation)
                return await live(Outside().play, rows, range(len(of)), names, service, limits, **how)

            training = live_call(calls[0], groups, is_evaluation=False)
            living = asyncio.gather(training, live_call(calls[1], held_out, is_evaluation=True))
            head = {"Authorization": f"Bearer {TOKEN}"}
            async with httpx2.AsyncClient(
                base_url=address(), headers=head, timeout=60, trust_env=False, verify=False
            ) as http:
                await act(http)
                episodes = [episode for call in await living for episode in call]
        await asyncio.to_thread(gateway.close)
        return episodes

    return asyncio.run(run())


async def opened(http: httpx2.AsyncClient, task: Any = "t", **more: Any) -> dict[str, Any]:
    """Open a session. Returns what the run says of it."""
    body = {"wait_s": 60, **({} if task is None else {"task": task}), **more}
    answer = await http.post("/sessions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask(session: dict[str, Any], key: str | None = None) -> int:
    """Ask the model, as any client of the OpenAI API does. Returns the status."""
    head = {"Authorization": f"Bearer {session['api_key'] if key is None else key}"}
    async with httpx2.AsyncClient(timeout=60, trust_env=False, verify=False) as http:
        answer = await http.post(f"{session['base_url']}/chat/completions", json={"messages": [USER]}, headers=head)
    return answer.status_code


async def give_up(http: httpx2.AsyncClient, session: dict[str, Any]) -> None:
    """End a session without a reward."""
    await http.post(f"/sessions/{session['id']}/end", json={"failed": "the user left"})


def outcomes(episodes: Sequence[Episode]) -> list[tuple[str, float | None]]:
    """Why each session failed, and its score."""
    return [(one.failure, one.trajectories[0].score if one.trajectories else None) for one in episodes]


def test_a_service_opens_sessions_and_rewards_them_later() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        first, second = await opened(http), await opened(http)
        assert first["id"] != second["id"] and first["api_key"] != second["api_key"]
        assert await ask(first) == await ask(first) == await ask(second) == 200
        ended = await http.post(f"/sessions/{first['id']}/end")
        assert ended.json() == {"id": first["id"], "turns": 2}
        assert await ask(first) == 404  # nothing more is said in it
        turn = {"reward": 0.25, "turn": 1}
        assert (await http.post(f"/sessions/{first['id']}/reward", json=turn)).status_code == 200
        reward = {"reward": {"score": 1.0, "style": 0.5}}
        assert (await http.post(f"/sessions/{first['id']}/reward", json=reward)).status_code == 200
        assert (await http.post(f"/sessions/{second['id']}/reward", json={"reward": -1})).status_code == 200
        assert await ask(second) == 404  # a reward ends a session

    episodes = lived(act)
    assert outcomes(episodes) == [("", 1.0), ("", -1.0)]
    assert dict(episodes[0].parts) == {"style": 0.5}
    assert dict(episodes[0].trajectories[0].turn_rewards) == {1: 0.25}
    assert [len(one.trajectories[0].session.calls) for one in episodes] == [2, 1]


def test_sessions_of_one_task_are_one_group_in_whatever_order_they_are_opened() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        groups: dict[str, set[int]] = {}
        for task in ["a", "b", "a", "b"]:
            session = await opened(http, {"task": task})
            groups.setdefault(task, set()).add(int(session["id"].rpartition("-")[2]) // 2)
            await ask(session)
            await http.post(f"/sessions/{session['id']}/reward", json={"reward": float(task == "a")})
        assert groups == {"a": {0}, "b": {1}}
        late = await http.post("/sessions", json={"task": "a"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "no_session_wanted")
        assert late.headers["retry-after"] == "1"

    assert outcomes(lived(act, (0, 0, 1, 1))) == [("", 1.0), ("", 1.0), ("", 0.0), ("", 0.0)]


def test_a_group_waits_for_room_and_takes_no_other_task() -> None:
    """With room for one session at a time the second of a task waits, instead of beginning another group."""

    async def act(http: httpx2.AsyncClient) -> None:
        opening = [asyncio.create_task(opened(http, task)) for task in "aab"]
        ids: list[str] = []
        for next_session in opening:
            session = await next_session
            ids.append(session["id"])
            await ask(session)
            await http.post(f"/sessions/{session['id']}/reward", json={"reward": 1})
        assert ids == ["1-1-0", "1-1-1", "1-1-2"]

    assert outcomes(lived(act, (0, 0, 1), at_once=1)) == [("", 1.0)] * 3


GIVEN_UP = ("the service gave it up: the user left", None)
REASONS = {
    "not opened": "no service opened it within open_limit_s = 0.5",
    "not ended": "the service did not end it within time_limit_s = 0.5",
    "not rewarded": "its reward did not come within reward_limit_s = 0.5",
    "given up": GIVEN_UP[0],
}


@pytest.mark.everyday("not ended", "not rewarded")
@pytest.mark.parametrize("how", REASONS)
def test_a_session_without_a_reward_within_its_limits_is_left_out_by_its_reason(how: str) -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        if how == "not opened":
            return
        session = await opened(http)
        await ask(session)
        path = f"/sessions/{session['id']}"
        if how == "not rewarded":
            await http.post(f"{path}/end")
        if how == "given up":
            await give_up(http, session)
        await asyncio.sleep(1.0)
        late = await http.post(f"{path}/reward", json={"reward": 1.0})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_left_out")
        assert REASONS[how] in late.text
        assert await ask(session) == 404

    limits_s = (60.0 if how != "not ended" else 0.5, 0.5 if how == "not opened" else 60.0, 0.5)
    assert outcomes(lived(act, (0,), limits_s=limits_s))[0][0] == REASONS[how]


def test_only_the_token_of_the_service_opens_ends_and_rewards() -> None:
    """An agent with the key of its session does not reward itself, and the service's token is no session's key."""

    async def act(http: httpx2.AsyncClient) -> None:
        session = await opened(http)
        for path, body in [("/reward", {"reward": 1e6}), ("/reward", {"reward": 1, "turn": 0}), ("/end", {})]:
            for key in (session["api_key"], "-", "x", session["id"]):
                head = {"Authorization": f"Bearer {key}"}
                assert (await http.post(f"/sessions/{session['id']}{path}", json=body, headers=head)).status_code == 401
        head = {"Authorization": f"Bearer {session['api_key']}"}
        assert (await http.post("/sessions", json={"task": "t"}, headers=head)).status_code == 401
        assert [await ask(session, key) for key in (TOKEN, "-", session["id"])] == [401] * 3
        assert await ask(session) == 200
        assert (await http.post("/sessions/1-1-1/reward", json={"reward": 1})).status_code == 404  # nobody opened it
        assert (await http.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})).status_code == 200
        await give_up(http, await opened(http))

    assert outcomes(lived(act)) == [("", 0.5), GIVEN_UP]


BAD: list[tuple[str, Any]] = [
    ("reward", {}), ("reward", {"reward": None}), ("reward", {"reward": "1"}), ("reward", {"reward": True}),
    ("reward", {"reward": {"style": 1}}), ("reward", {"reward": {"score": "high"}}), ("reward", {"score": 1}),
    ("reward", {"reward": 1, "turn": 7}), ("reward", {"reward": 1, "turn": "0"}), ("reward", [1]),
    ("reward", {"reward": 1, "agents": 1}), ("end", {"failed": 1}), ("end", {"reward": 1}),
]  # fmt: skip


def test_what_is_no_reward_is_refused_and_never_zero() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        session = await opened(http)
        await ask(session)
        for path, body in BAD:
            answer = await http.post(f"/sessions/{session['id']}/{path}", json=body)
            assert answer.status_code == 400, body
        nan = await http.post(f"/sessions/{session['id']}/reward", content=b'{"reward": NaN}')
        assert nan.status_code == 400
        for body in ({"task": "t", "wait_s": 301}, {"task": "t", "n": 2}, {"wait_s": 0}):
            assert (await http.post("/sessions", json=body)).status_code == 400, body
        await http.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})
        await give_up(http, await opened(http))  # what was refused has opened none

    assert outcomes(lived(act)) == [("", 0.5), GIVEN_UP]


def test_a_repeated_request_opens_one_session_and_rewards_it_once() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        head = {"Idempotency-Key": "open"}
        twice = [await http.post("/sessions", json={"task": "t", "wait_s": 60}, headers=head) for _ in range(2)]
        assert twice[0].json() == twice[1].json()
        session = twice[0].json()
        await ask(session)
        for _ in range(2):
            body = {"reward": 0.5, "turn": 0}
            await http.post(f"/sessions/{session['id']}/reward", json=body, headers={"Idempotency-Key": "turn"})
        statuses = [
            (await http.post(f"/sessions/{session['id']}/reward", json={"reward": value})).status_code
            for value in (1.0, 1.0, 2.0)
        ]
        assert statuses == [200, 200, 409]  # the same again is fine, and another is not
        await give_up(http, await opened(http))  # the last one: the repeated request has opened none

    episodes = lived(act)
    assert outcomes(episodes) == [("", 1.0), GIVEN_UP]
    assert dict(episodes[0].trajectories[0].turn_rewards) == {0: 0.5}


def test_a_service_may_live_the_tasks_of_the_data() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        assert (await http.post("/sessions", json={"task": "t"})).status_code == 400
        rows = []
        for _ in range(4):
            session = await opened(http, None)
            rows.append(session["task"])
            await ask(session)
            await http.post(f"/sessions/{session['id']}/reward", json={"reward": 1})
        assert [row["prompt"] for row in rows] == ["row 0", "row 0", "row 1", "row 1"]

    assert outcomes(lived(act, (0, 0, 1, 1), names_tasks=False)) == [("", 1.0)] * 4


@pytest.mark.parametrize("names_tasks", [True, False])
def test_an_evaluation_gives_its_tasks_first_and_marks_them(names_tasks: bool) -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        task = "t" if names_tasks else None
        early = await opened(http, task, evaluation=False)
        assert early["evaluation"] is False
        held_out = [await opened(http, task), await opened(http, None, evaluation=True)]
        assert [session["evaluation"] for session in held_out] == [True, True]
        assert [session["task"]["prompt"] for session in held_out] == ["row 7", "row 8"]
        for session, reward in zip([early, *held_out], (0.5, 1.0, 0.0), strict=True):
            for other in [early, *held_out]:  # the key of a session of training is none for one of the evaluation
                assert await ask(session, other["api_key"]) == (200 if session is other else 401)
            await http.post(f"/sessions/{session['id']}/reward", json={"reward": reward})
        none_left = await http.post("/sessions", json={"evaluation": True})
        assert none_left.status_code == 503
        late = await opened(http, task)
        assert late["evaluation"] is False and late.get("task", {"prompt": "row 0"})["prompt"] == "row 0"
        await ask(late)
        await http.post(f"/sessions/{late['id']}/reward", json={"reward": 0.25})

    episodes = lived(act, (0, 0), names_tasks=names_tasks, held_out=(7, 8))
    assert outcomes(episodes) == [("", 0.5), ("", 0.25), ("", 1.0), ("", 0.0)]


def test_an_agent_can_neither_open_nor_reward_what_it_lives_or_others_live() -> None:
    """It has the key of its session, its address and the names of other sessions, and tries what it can."""

    async def act(http: httpx2.AsyncClient) -> None:
        trained, held_out = await opened(http, evaluation=False), await opened(http, None, evaluation=True)
        for key in (trained["api_key"], held_out["api_key"], held_out["id"], "-", f"{TOKEN}x", TOKEN[:-1]):
            for head in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key, "Authorization": ""}):
                tries: list[tuple[str, Any]] = [("/sessions", {"task": "t"}), ("/sessions", {"evaluation": True})]
                for session in (trained, held_out):
                    path = f"/sessions/{session['id']}"
                    tries += [(f"{path}/reward", {"reward": 9.0}), (f"{path}/end", {"failed": "x"})]
                    tries += [(f"{path}/x/../reward", {"reward": 9.0}), (f"{path}//reward", {"reward": 9.0})]
                    tries += [(f"{path}/v1/chat/completions/reward", {"reward": 9.0})]
                for path, body in tries:
                    assert (await http.post(path, json=body, headers=head)).status_code in (401, 404), (path, head)
        assert await ask(trained, held_out["api_key"]) == await ask(held_out, trained["api_key"]) == 401
        assert await ask(trained, TOKEN) == 401  # the token of the service is no key of a session
        for session, reward in ((trained, 0.5), (held_out, 1.0)):
            await ask(session)
            await http.post(f"/sessions/{session['id']}/reward", json={"reward": reward})

    assert outcomes(lived(act, (0,), held_out=(0,))) == [("", 0.5), ("", 1.0)]


def test_a_request_for_an_evaluation_that_makes_no_sense_is_refused() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        for body in ({"evaluation": "yes"}, {"evaluation": 1}, {"task": "t", "evaluation": True}):
            refused = await http.post("/sessions", json=body)
            assert refused.status_code == 400, body
        assert (await http.post("/sessions", json={"task": "t", "evaluation": True})).status_code == 400

    assert outcomes(lived(act, (0,), limits_s=(60, 1, 60)))[0][0].startswith("no service opened it")


def test_limits_hold_in_an_evaluation() -> None:
    async def act(http: httpx2.AsyncClient) -> None:
        session = await opened(http, None, evaluation=True)
        await ask(session)
        await http.post(f"/sessions/{session['id']}/end")

    failures = [one.failure for one in lived(act, (), limits_s=(60, 1, 1), held_out=(0, 1))]
    assert failures[0].startswith("its reward did not come within") and failures[1].startswith("no service opened it")


def test_a_service_without_a_token_or_with_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvironmentConfig(name=OUTSIDE, options={"time_limit_s": 10, "open_limit_s": 20, "reward_limit_s": 30})
    assert (is_outside(config), longest_session_s(config)) == (True, 60.0)
    with pytest.raises(ConfigError, match="processes has no use"):
        resolve_environment(EnvironmentConfig(name=OUTSIDE, options={"processes": 2}))
    with pytest.raises(ConfigError, match="reward_limit_s = -1"):
        resolve_environment(EnvironmentConfig(name=OUTSIDE, options={"reward_limit_s": -1}))
    monkeypatch.delenv("PODIUM_TOKEN")
    with pytest.raises(ConfigError, match="PODIUM_TOKEN"):
        check_environment(config, DataConfig())
