"""What a session costs beside the model: calls of many sessions at once to an engine that answers at once.

    python -m bench.sessions        1,000 sessions of 10 calls in the worker's process, in processes of their own and
                                    over HTTP, beside a raw floor; then a real model of 1M parameters, whose single
                                    answers are drawn by sessions and by batches

    python -m bench.sessions --only turns,load      these parts alone; none for the page alone

Writes sessions.json beside this file, and from it the tables of docs/environments.md. The echo engine draws a fixed
answer of 16 tokens, so all that is measured there is ours: writing the conversation by its template, finding what the
session has recorded, reading the answer, recording it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import put_section
from bench.session_load import converse, measure_load
from podium.devices import end_idle_threads
from podium.models import char_tokenizer
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.environments.client import Client
from podium_agents.environments.processes import SessionProcesses
from podium_agents.environments.runner import live
from podium_agents.service.admission import Admission
from podium_agents.service.chat_format import chat_format
from podium_agents.service.request_bodies import ChatRequest
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled
from podium_serve.gateway import Gateway

SESSIONS, TURNS, ANSWER = 1000, 10, 16
RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "environments.md"
MARK = "<!-- begin: python -m bench.sessions -->"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Echo:
    """A source that answers at once, always the same."""

    positions: int | None = None
    in_flight = 0
    waiting = 0
    version = 0
    prompt_tokens = None

    def __init__(self, answer: Sequence[int]) -> None:
        self.drawn = Sampled([*answer], [-1.0] * len(answer), [0] * len(answer), "stop")
        self.admission = Admission()

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: object = None,
        constraint: object = None,
        exact: bool = True,
    ) -> AsyncGenerator[Sampled]:
        """The answer."""
        await asyncio.sleep(0)
        yield self.drawn

    def end_session(self, name: str) -> None:
        """Forget a session."""
        self.admission.end(name)

    async def score(self, ids: Sequence[int], **how: Any) -> Any:
        """Nothing is scored here."""
        raise NotImplementedError


def make_tokenizer() -> Any:
    """One token a character, and two special ones."""
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n", chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # type: ignore[arg-type]
    return tokenizer


def make_service() -> Service:
    """A service of the echo."""
    tokenizer = make_tokenizer()
    answer = tokenizer.encode("It is " + "9" * (ANSWER - 7) + "<|im_end|>", add_special_tokens=False)
    form = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    return Service(
        *(Echo(answer), form, tokenizer),
        model="echo",
        context=1 << 20,
        stop_token_ids=(),
        most_tokens=1 << 60,
        rules=SamplingParams(max_new_tokens=ANSWER),
    )


def figures(label: str, calls_s: list[float], wall_s: float, lost: int) -> dict[str, Any]:
    """The row of one way."""
    return {
        "way": label,
        "calls": len(calls_s),
        "ms_a_call": round(1e3 * wall_s / max(1, len(calls_s)), 3),
        "lost": lost,
    }


async def in_process(sessions: int, turns: int) -> dict[str, Any]:
    """Sessions in the event loop of the service."""
    service, calls = make_service(), list[float]()

    async def play(task: Any, client: Client) -> float:
        said: list[dict[str, Any]] = [{"role": "user", "content": "Which number is it, please?"}]
        for _ in range(turns):
            began = time.perf_counter()
            reply = await client.chat(said)
            calls.append(time.perf_counter() - began)
            said += [reply.message, {"role": "user", "content": "Are you sure?"}]
        return 1.0

    began = time.perf_counter()
    episodes = await live(
        *(play, [{}] * sessions, range(sessions), [f"s{n}" for n in range(sessions)], service),
        SessionLimits(at_once=sessions),
        address=lambda: "",
    )
    wall_s = time.perf_counter() - began
    rows = [row for one in episodes for trajectory in one.trajectories for row in trajectory.session.rows]
    whole = sum(len(row.turns) == turns and sum(row.sampled) == turns * ANSWER for row in rows)
    return figures("sessions in process", calls, wall_s, sessions - whole)


async def by_turn(turns: int = 400) -> dict[str, Any]:
    """Processor time of a call in a session that grows, in milliseconds: the mean of ten calls up to each turn."""
    service, said = make_service(), [{"role": "user", "content": "Which number is it, please?"}]
    service.open_session("s", 0)
    times: list[float] = []
    for _ in range(turns):
        request = ChatRequest(messages=[dict(message) for message in said])
        began = time.process_time()
        answer = await service.answer(service.chat(request, "s"))
        times.append(time.process_time() - began)
        said += [answer.message, {"role": "user", "content": "Are you sure?"}]
    at = (10, 100, 200, turns)
    return {
        "way": "a call of one session",
        **{f"ms_at_{turn}": round(100 * sum(times[turn - 10 : turn]), 2) for turn in at},
    }


async def talk(task: Any, client: Client) -> float:
    """A session; it fails where an answer is missing."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Which number is it, please?"}]
    for _ in range(task["turns"]):
        reply = await client.chat(said)
        said += [reply.message, {"role": "user", "content": "Are you sure?"}]
    return 1.0


async def in_processes(sessions: int, turns: int, processes: int = 2) -> dict[str, Any]:
    """Sessions in forks, whose calls are answered by this process."""
    config = EnvironmentConfig(name="bench.sessions:talk", options={"processes": processes})
    service, apart = make_service(), SessionProcesses(config)
    apart.start()
    began = time.perf_counter()
    episodes = await live(
        *(apart.play, [{"turns": turns}] * sessions, range(sessions), [f"s{n}" for n in range(sessions)], service),
        config.limits,
        address=lambda: "",
    )
    wall_s = time.perf_counter() - began
    apart.close()
    calls = [call for one in episodes for trajectory in one.trajectories for call in trajectory.session.calls]
    return figures("sessions in processes", [0.0] * len(calls), wall_s, sum(bool(one.failure) for one in episodes))


async def over_http(sessions: int, turns: int, at_once: int = 64) -> dict[str, Any]:
    """Sessions that ask over HTTP on loopback, from the same event loop."""
    import httpx2

    service, calls = make_service(), list[float]()
    room = asyncio.Semaphore(at_once)
    gateway = Gateway()
    async with (
        gateway.open(service, "s") as address,
        httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_keepalive_connections=None)) as http,
    ):

        async def play(task: Any, client: Client) -> float:
            said: list[dict[str, Any]] = [{"role": "user", "content": "Which number is it, please?"}]
            for _ in range(turns):
                async with room:
                    began = time.perf_counter()
                    answer = await http.post(
                        f"{client.base_url}/chat/completions",
                        json={"model": "echo", "messages": said},
                        headers={"Authorization": f"Bearer {client.api_key}"},
                    )
                    calls.append(time.perf_counter() - began)
                answer.raise_for_status()
                said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
            return 1.0

        began = time.perf_counter()
        episodes = await live(
            *(play, [{}] * sessions, range(sessions), [f"s-{n}" for n in range(sessions)], service),
            SessionLimits(at_once=sessions),
            address=address,
            key_of=gateway.keys.key_of,
        )
        wall_s = time.perf_counter() - began
    failed = sum(bool(one.failure) for one in episodes)
    return figures("sessions over HTTP", calls, wall_s, failed)


async def floor(calls_count: int, at_once: int = 64) -> dict[str, Any]:
    """A bare application of starlette and uvicorn that answers the same bytes, and the same client."""
    import httpx2
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request: Any) -> JSONResponse:
        await request.json()
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "It is 999999999"}}]})

    app = Starlette(routes=[Route("/v1/chat/completions", echo, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  it has no event
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    calls, room = list[float](), asyncio.Semaphore(at_once)
    said = [{"role": "user", "content": "Which number is it, please?"}] * 10
    async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_keepalive_connections=None)) as http:

        async def one() -> None:
            async with room:
                began = time.perf_counter()
                await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"model": "x", "messages": said})
                calls.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(calls_count)))
        wall_s = time.perf_counter() - began
    server.should_exit = True
    await serving
    return figures("bare starlette and httpx", calls, wall_s, 0)


async def by_turn_over_http(turns: int = 400) -> dict[str, Any]:
    """As :func:`by_turn`, over HTTP: the processor time of server and client together."""
    service, gateway, times = make_service(), Gateway(), list[float]()
    service.open_session("s-0", 0)
    async with gateway.open(service, "s") as address:
        url = await asyncio.to_thread(address)
        await converse(url, "s-0", gateway.keys.key_of("s-0"), turns, times, clock=time.process_time)
    at = (10, 100, 200, turns)
    return {
        "way": "a call of one session over HTTP, with the client",
        **{f"ms_at_{turn}": round(100 * sum(times[turn - 10 : turn]), 2) for turn in at},
    }


def make_model(positions: int) -> Any:
    """A model of a million parameters with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=len(make_tokenizer()), **shape)
    return AutoModelForCausalLM.from_config(config).eval()


def by_model(rows: int = 512, tokens: int = 64) -> list[dict[str, Any]]:
    """Tokens a second of a model of a million parameters: a batch of single answers, and sessions of one call."""
    from podium.rollout.engines import EngineConfig, make_engine
    from podium_agents.service.engine_client import EngineClient

    tokenizer = make_tokenizer()
    engine = make_engine(EngineConfig(), make_model(positions=256))
    form = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    params = SamplingParams(max_new_tokens=tokens)
    service = Service(
        *(EngineClient(engine), form, tokenizer),
        **{"model": "m", "context": 256, "stop_token_ids": (), "most_tokens": 1 << 60, "rules": params},
    )
    said = [[{"role": "user", "content": f"Which number is it, please, {row}?"}] for row in range(rows)]
    prompts = [form.prompt(messages) for messages in said]

    def batch() -> int:
        return sum(len(one) for one in engine.generate(prompts, params, list(range(rows))))

    async def play(task: Any, client: Client) -> float:
        await client.chat(task["messages"])
        return 1.0

    def sessions() -> int:
        episodes = asyncio.run(
            live(
                *(play, [{"messages": one} for one in said], range(rows), [f"s{n}" for n in range(rows)], service),
                SessionLimits(at_once=rows),
                address=lambda: "",
            )
        )
        return sum(sum(row.sampled) for one in episodes for t in one.trajectories for row in t.session.rows)

    found: list[dict[str, Any]] = []
    for label, draw in (("batch", batch), ("sessions", sessions)):
        began = time.perf_counter()
        drawn = draw()
        end_idle_threads()  # as a generator does before another thread draws
        found.append({"way": f"1M model, {label}", "tokens_per_s": round(drawn / (time.perf_counter() - began))})
    return found


def remembered(
    sessions: int = 256, lanes: int = 128, turns: int = 20, drawn: int = 24, added: int = 8
) -> dict[str, Any]:
    """How many prompt tokens a model of a million parameters computes for conversations that grow, of which fewer are
    drawn at a time than are open: those that are new, or the whole history at each turn."""
    import random

    from podium.rollout.engines import EngineConfig, Finished, Request, make_engine

    engine, chance = make_engine(EngineConfig(max_sequences=lanes), make_model(positions=2048)), random.Random(0)
    params = SamplingParams(max_new_tokens=drawn)
    texts = [chance.choices(range(90), k=64) for _ in range(sessions)]
    new = sum(map(len, texts))
    began = time.perf_counter()
    for turn in range(turns):
        for number, text in enumerate(texts):
            engine.submit(Request(id=number, prompt=text, params=params, seed=turn))
        while events := engine.poll():
            for event in events:
                if isinstance(event, Finished):
                    texts[event.id] += [*event.completion.token_ids.tolist(), *chance.choices(range(90), k=added)]  # type: ignore[index]
        new += sessions * (added + 1) * (turn + 1 < turns)  # and the last token drawn, which was not fed
    counts: Any = engine.prompt_tokens
    return {
        "way": f"{sessions} sessions of {turns} turns, {lanes} drawn at a time",
        "prompt_tokens": counts.read,
        "new": new,
        "computed": engine.prefilled_tokens,
        "seconds": round(time.perf_counter() - began, 1),
    }


def ms_a_call(sessions: int, turns: int, repeats: int) -> list[dict[str, Any]]:
    """What a call takes on each way: the medians of rounds in which the ways take turns."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for found in (
            asyncio.run(in_process(sessions, turns)),
            asyncio.run(in_processes(sessions, turns)),
            asyncio.run(over_http(sessions, turns)),
            asyncio.run(floor(sessions * turns)),
        ):
            rows.setdefault(found["way"], []).append(found)
    return [
        {
            "way": way,
            "ms_a_call": statistics.median(one["ms_a_call"] for one in found),
            "calls": found[0]["calls"],
            "lost": sum(one["lost"] for one in found),
        }
        for way, found in rows.items()
    ]


def tokens_per_s(repeats: int) -> list[dict[str, Any]]:
    """Batches and sessions of the real model, and the median of their ratios."""
    both = [by_model() for _ in range(repeats + 1)][1:]  # the first warms up
    return [
        *(
            {
                "way": both[0][place]["way"],
                "tokens_per_s": statistics.median(one[place]["tokens_per_s"] for one in both),
            }
            for place in range(2)
        ),
        {"way": "ratio", "of": round(statistics.median(b["tokens_per_s"] / a["tokens_per_s"] for a, b in both), 3)},
    ]


def measure_parts(sessions: int, turns: int, repeats: int) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """What there is to measure, by the name of ``--only``."""
    return {
        "ways": lambda: ms_a_call(sessions, turns, repeats),
        "model": lambda: tokens_per_s(repeats),
        "turns": lambda: [asyncio.run(by_turn()), asyncio.run(by_turn_over_http())],
        "memory": lambda: [remembered()],
        "load": lambda: [asyncio.run(measure_load(workers, sessions, turns)) for workers in (1, 2)],
    }


def write_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in place of those of the same ways, and the page from all of them."""
    measured = {row["way"]: row for row in rows}
    before = {row["way"]: row for row in json.loads(RESULTS.read_text())}
    text = ",\n".join(json.dumps(row) for row in {**before, **measured}.values())
    RESULTS.write_text(f"[\n{text}\n]\n")
    PAGE.write_text(put_section(PAGE.read_text(), write_section({**before, **measured}), MARK))


def write_section(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of the page."""
    turns = [row for row in rows.values() if "ms_at_10" in row]
    loads = [row for row in rows.values() if "p50_ms" in row]
    names = [name for name in turns[0] if name.startswith("ms_at_")] if turns else []
    lines = [
        f"| processor time of a call, in ms | {' | '.join(f'turn {name[6:]}' for name in names)} |",
        f"|{'---|' * (len(names) + 1)}",
        *(f"| {row['way']} | {' | '.join(str(row[name]) for name in names)} |" for row in turns),
        "",
        "| at once | calls | sessions lost | p50 | p99 | calls a second | processor time a call | a loop is full at |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['way']} | {row['calls']:,} | {row['lost']} | {row['p50_ms'] / 1e3:.1f} s | "
            f"{row['p99_ms'] / 1e3:.1f} s | {row['calls_per_s']} | {row['cpu_ms_a_call']} ms | "
            f"{row['loop_is_full_at_calls_per_s']} calls a second |"
            for row in loads
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="ways,model,turns,memory,load", help="the parts to measure, with commas")
    arguments = parser.parse_args()
    parts = measure_parts(arguments.sessions, arguments.turns, arguments.repeats)
    for name in filter(None, arguments.only.split(",")):
        rows = parts[name]()
        write_rows(rows)
        sys.stdout.write("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
