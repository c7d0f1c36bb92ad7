"""Sessions that a service elsewhere opens and rewards, over HTTP. The token of the service is asked for everywhere.

POST /sessions              a session of a task: its base_url and its key, for any client of the OpenAI API
POST /sessions/ID/end       no more requests to the model; the reward may come later
POST /sessions/ID/reward    what it earned, which ends it, or what one of its answers earned
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from podium_agents.service.keys import OneToken
from podium_agents.service.request_bodies import Refusal
from podium_serve.exchange import as_json, read_body, while_there
from podium_serve.repeats import Repeats
from podium_serve.routes import guard, make_application

if TYPE_CHECKING:
    from podium_serve.offers import Offer, Offers

__all__ = ["make_outside_app"]

_MOST_WAIT_S: Final = 300.0
_LONGEST_REASON: Final = 200


def make_outside_app(offers: Offers, token: str) -> Starlette:
    """Return the application, which answers the bearer of ``token``."""
    outside, access, repeats = _Outside(offers), OneToken(token), Repeats()
    handlers = {
        "/sessions": outside.open,
        "/sessions/{session}/end": outside.end,
        "/sessions/{session}/reward": outside.reward,
    }
    return make_application(
        [Route(path, guard(handler, access, path, repeats), methods=["POST"]) for path, handler in handlers.items()]
    )


class _Outside:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    async def open(self, request: Request) -> Response:
        body = await _read(request, {"task", "wait_s", "evaluation"})
        wait_s = _call_checks(lambda: self._offers.read_number(body.get("wait_s", 0.0), "wait_s"))
        if not 0 <= wait_s <= _MOST_WAIT_S:
            raise Refusal(400, f"wait_s is {wait_s:g}: expected seconds from 0 to {_MOST_WAIT_S:g}", "wait_s")
        if not isinstance(evaluation := body.get("evaluation"), bool | None):
            raise Refusal(400, f"evaluation is {evaluation!r}: expected true, false or null", "evaluation")
        try:
            (offer,) = await while_there(request, [self._offers.open(body.get("task"), wait_s, evaluation)])
        except ValueError as error:
            raise Refusal(400, str(error), "task") from None
        if offer is None or offer.client is None:
            raise Refusal(503, "the run wants no session of this task now: try again later", code="no_session_wanted")
        client = offer.client
        session = {
            "id": offer.name,
            "base_url": client.base_url,
            "api_key": client.api_key,
            "model": client.model,
            "time_limit_s": self._offers.time_limit_s,
            "reward_limit_s": self._offers.reward_limit_s,
            "evaluation": offer.is_evaluation,
        }
        task = self._offers.task_of(offer)
        return JSONResponse(session if task is None else {**session, "task": dict(task)})

    async def end(self, request: Request) -> Response:
        body = await _read(request, {"failed"}, required=False)
        reason = body.get("failed", "")
        if not isinstance(reason, str):
            raise Refusal(400, f"failed is {reason!r}: expected the reason as a text", "failed")
        offer = self._find(request)
        if offer.outcome is None and not offer.left_out:
            offer.end(reason[:_LONGEST_REASON])
        return JSONResponse({"id": offer.name, "turns": offer.turns})

    async def reward(self, request: Request) -> Response:
        body = await _read(request, {"reward", "agents", "turn"})
        offer = self._find(request)
        if "turn" in body:
            turn = body["turn"]
            if not isinstance(turn, int) or isinstance(turn, bool) or "agents" in body:
                raise Refusal(400, f"turn is {turn!r}: expected the number of an answer, and no agents", "turn")
            _call_checks(lambda: offer.reward_turn(self._offers.read_number(body.get("reward"), "reward"), turn))
        else:
            outcome = _call_checks(lambda: self._offers.read_outcome(body))
            if offer.left_out:
                raise Refusal(410, f"the session {offer.name!r} is left out: {offer.left_out}", code="session_left_out")
            if offer.outcome not in (None, outcome) or offer.failure:
                raise Refusal(409, f"the session {offer.name!r} has another reward, or was given up", "reward")
            offer.settle(outcome)
        return JSONResponse({"id": offer.name, "turns": offer.turns})

    def _find(self, request: Request) -> Offer:
        name = request.path_params["session"]
        if (offer := self._offers.get(name)) is None:
            raise Refusal(
                404,
                f"the session {name!r} is not known: it was never opened, or ended long ago, or the run was resumed",
            )
        return offer


async def _read(request: Request, names: set[str], *, required: bool = True) -> Mapping[str, Any]:
    """Return a body of these entries. Raises Refusal for any other."""
    raw = await read_body(request)
    body = as_json(raw) if raw or required else {}
    if not isinstance(body, dict) or not body.keys() <= names:
        raise Refusal(400, f"the body is not of this form: expected an object with {', '.join(sorted(names))}")
    return body


def _call_checks(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError as error:
        raise Refusal(400, str(error)) from None
