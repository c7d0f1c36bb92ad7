"""Agents of other libraries: each is trained, and asks `podium serve`, with a tool, a graph or a loop of two turns.

    agent ─▶ Recorder ─▶ the run, or what is served        the recorder asks for ids and log-probabilities besides

What a session has sampled by the wire is what is trained, and the log-probabilities are those of the model. The
libraries are in environments of their own: `make test-clients`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import podium
from podium.installed import has_library
from podium.models import ModelConfig, load_model
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, InferenceConfig, build_config
from podium_serve import served
from tests.integration.training import MODEL, metrics_rows, tiny, train
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the libraries, whose warnings are not ours to mend
]
pytest.importorskip("uvicorn")

LIBRARIES = {"openai_agents": "agents", "langgraph": "langgraph", "litellm": "litellm", "inspect": "inspect_ai"}
"""The module of each client, which is in the environment .venvs/NAME, but for "_" in place of "-"."""

TOKEN = "secret"
PRICES = {"bolt": 3, "nut": 2}
PRICE_TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look a price up.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": [*PRICES]}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Exchange:
    """A request and its answer: the session that the address names, the path, the body, and what was sampled."""

    session: str
    path: str
    body: Mapping[str, Any]
    prompt: Sequence[int] = ()
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    count: int = 0

    @property
    def is_free(self) -> bool:
        """Whether each token could be drawn."""
        return self.body.get("tool_choice") in (None, "auto", "none", {"type": "auto"})


@dataclass
class Recorder:
    """Hands requests on, and keeps them with what was sampled. Its ``url`` stands for any address."""

    exchanges: list[Exchange] = field(default_factory=list)
    refusals: list[tuple[Any, bytes]] = field(default_factory=list)
    targets: dict[str, str] = field(default_factory=dict)
    url: str = ""

    def address(self, base_url: str) -> str:
        """Return the address by which requests to ``base_url`` are recorded."""
        host, _, path = base_url.removeprefix("http://").partition("/")
        self.targets[host.replace(":", "-")] = f"http://{host}"
        return f"{self.url}/{host.replace(':', '-')}/{path}"

    def hand_on(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, str, bytes]:
        """Return the status, the type and the body of the answer."""
        _, host, path = path.split("/", 2)
        session = path.split("/")[1] if path.startswith("sessions/") else ""
        exchange = Exchange(session, path.partition("v1/")[2].partition("?")[0], body)
        if exchange.path == "chat/completions":
            body = {**body, "logprobs": True, "return_token_ids": True}
        kept = {name: value for name, value in headers.items() if name.lower() in ("authorization", "x-api-key")}
        request = urllib.request.Request(
            f"{self.targets[host]}/{path}", json.dumps(body).encode(), {**kept, "Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                content, kind = answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            self.refusals.append((body, content := error.read()))
            return error.code, "application/json", content
        events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: {")]
        parts = [json.loads(event) for event in events] if "event-stream" in kind else [json.loads(content)]
        choices = [choice for part in parts for choice in part.get("choices", ())]
        exchange.prompt = next((part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part), ())
        exchange.ids = [id for choice in choices for id in choice.get("token_ids") or ()]
        entries = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or ()]
        exchange.logprobs = [entry["logprob"] for entry in entries]
        for part in parts:
            usage = part.get("usage") or part.get("response", {}).get("usage") or {}
            exchange.count = usage.get("completion_tokens") or usage.get("output_tokens") or exchange.count
        exchange.count = exchange.count or len(exchange.ids)  # a stream says it only if it is asked
        self.exchanges.append(exchange)
        return 200, kind, content


RECORDER = Recorder()


@pytest.fixture(autouse=True)
def _record(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, kind, content = RECORDER.hand_on(self.path, dict(self.headers), body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "LANGSMITH_TRACING"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        RECORDER.exchanges, RECORDER.refusals, RECORDER.targets = [], [], {}
        RECORDER.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield
        server.shutdown()


# -- the agents ------------------------------------------------------------------------------------------------------


def price(name: str) -> str:
    """Look a price up."""
    return str(PRICES[name])


def score(text: str | None) -> float:
    """Return a reward that differs from answer to answer. Raises ValueError for an agent that was answered nothing."""
    if not text:
        raise ValueError("the last answer is empty")
    return sum(map(ord, text)) % 7 / 6


async def sdk_chat(task: Any, client: Any) -> float:
    """The OpenAI Agents SDK, by the API of conversations: a tool that the first answer has to call."""
    from agents import OpenAIChatCompletionsModel

    return await _run_sdk(task, client, OpenAIChatCompletionsModel)


async def sdk_responses(task: Any, client: Any) -> float:
    """The OpenAI Agents SDK as it is without settings: by the Responses API. It raises at an answer that is cut off."""
    from agents import OpenAIResponsesModel

    return await _run_sdk(task, client, OpenAIResponsesModel)


async def _run_sdk(task: Any, client: Any, kind: Any) -> float:
    from typing import Literal

    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    def price(name: Literal["bolt", "nut"]) -> str:
        """Look a price up."""
        return str(PRICES[name])

    price.__annotations__["name"] = Literal["bolt", "nut"]
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=RECORDER.address(client.base_url), api_key=client.api_key, max_retries=0) as api:
        agent = Agent(
            name="clerk",
            instructions="Use the tools.",
            model=kind(model=client.model, openai_client=api),
            tools=[function_tool(price)],
            model_settings=ModelSettings(tool_choice="required"),  # the SDK takes it back after the first call
        )
        result = await Runner.run(agent, task["prompt"], max_turns=2)
    return score(result.final_output)


async def graph(task: Any, client: Any) -> float:
    """LangGraph: a node that looks up, the node of tools, and a node that answers."""
    return await _run_graph(task, client, streaming=False)


async def streamed_graph(task: Any, client: Any) -> float:
    """The same, where langchain-openai streams each answer."""
    return await _run_graph(task, client, streaming=True)


async def _run_graph(task: Any, client: Any, *, streaming: bool) -> float:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    model = ChatOpenAI(
        base_url=RECORDER.address(client.base_url), api_key=client.api_key, model=client.model, streaming=streaming,
        max_retries=0,
    )  # fmt: skip
    look_up = StructuredTool.from_function(price, args_schema=PRICE_TOOL["function"]["parameters"])  # type: ignore[index]

    async def look(state: Any) -> Any:
        forced = model.bind_tools([look_up], tool_choice="any")
        return {"messages": [await forced.ainvoke(state["messages"])]}

    async def answer(state: Any) -> Any:
        return {"messages": [await model.bind_tools([look_up]).ainvoke(state["messages"])]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("look", look)
    builder.add_node("tools", ToolNode([look_up]))
    builder.add_node("answer", answer)
    for one, other in ((START, "look"), ("look", "tools"), ("tools", "answer"), ("answer", END)):
        builder.add_edge(one, other)
    state = await builder.compile().ainvoke({"messages": [("system", "Use the tools."), ("user", task["prompt"])]})
    return score(state["messages"][-1].content)


async def litellm_chat(task: Any, client: Any) -> float:
    """litellm's own loop of two turns, the second one streamed."""
    import litellm

    litellm.suppress_debug_info = True

    where = {
        "api_base": RECORDER.address(client.base_url),
        "api_key": client.api_key,
        "model": f"openai/{client.model}",
    }
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    how = {"tools": [PRICE_TOOL], "num_retries": 0, **where}
    first: Any = await litellm.acompletion(messages=messages, tool_choice="required", **how)
    messages.append(first.choices[0].message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": price(**json.loads(call.function.arguments))}
        for call in first.choices[0].message.tool_calls
    ]
    stream: Any = await litellm.acompletion(messages=messages, stream=True, **how)
    chunks = [chunk async for chunk in stream]
    whole: Any = litellm.stream_chunk_builder(chunks)
    return score(whole.choices[0].message.content)


async def litellm_messages(task: Any, client: Any) -> float:
    """litellm as a client of the Messages API of Anthropic."""
    import litellm

    litellm.suppress_debug_info = True

    where = {"api_base": RECORDER.address(client.base_url).removesuffix("/v1"), "api_key": client.api_key}
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    how = {"tools": [PRICE_TOOL], "num_retries": 0, "model": f"anthropic/{client.model}", "max_tokens": 160, **where}
    first: Any = await litellm.acompletion(messages=messages, tool_choice="required", **how)
    messages.append(first.choices[0].message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": price(**json.loads(call.function.arguments))}
        for call in first.choices[0].message.tool_calls
    ]
    second: Any = await litellm.acompletion(messages=messages, **how)
    return score(second.choices[0].message.content)


async def inspect_agent(task: Any, client: Any) -> float:
    """inspect: its model, its tool, and its execution of calls."""
    from inspect_ai.model import ChatMessageUser, GenerateConfig, execute_tools, get_model
    from inspect_ai.tool import ToolDef, ToolParams
    from inspect_ai.util import JSONSchema

    async def look_up(name: str) -> str:
        return price(name)

    schema = JSONSchema(type="string", enum=[*PRICES], description="What.")
    tool = ToolDef(look_up, "price", "Look a price up.", ToolParams(properties={"name": schema}, required=["name"]))
    model = get_model(
        f"openai-api/podium/{client.model}", base_url=RECORDER.address(client.base_url), api_key=client.api_key,
        memoize=False, config=GenerateConfig(max_retries=0),
    )  # fmt: skip
    messages: list[Any] = [ChatMessageUser(content=task["prompt"])]
    output = await model.generate(messages, tools=[tool.as_tool()], tool_choice="any")
    messages.append(output.message)
    messages += (await execute_tools(messages, [tool.as_tool()])).messages
    output = await model.generate(messages, tools=[tool.as_tool()])
    return score(output.completion)


AGENTS: Mapping[str, Sequence[Callable[[Any, Any], Awaitable[float]]]] = {
    "openai_agents": (sdk_chat, sdk_responses),
    "langgraph": (graph, streamed_graph),
    "litellm": (litellm_chat, litellm_messages),
    "inspect": (inspect_agent,),
}
CASES = [
    pytest.param(
        agent,
        id=f"{library}-{agent.__name__}",
        marks=pytest.mark.skipif(
            not has_library(LIBRARIES[library]),
            reason=f"{library} is not installed here: make test-clients has it in an environment of its own",
        ),
    )
    for library, agents in AGENTS.items()
    for agent in agents
]


# -- the tests -------------------------------------------------------------------------------------------------------


def sections(folder: Path) -> dict[str, Any]:
    """A small model with the template of a large one, whose prompts have a place for tools."""
    tokenizer_of(FAMILIES[0]).save_pretrained(folder / "tokenizer")
    shape = {**MODEL["config"], "max_position_embeddings": 4096, "initializer_range": 0.2}
    return {"model": {"config": shape, "tokenizer": str(folder / "tokenizer")}}


@pytest.mark.parametrize("agent", CASES)
def test_what_an_agent_of_a_library_samples_is_what_is_trained(agent: Any, tmp_path: Path) -> None:
    run = train(
        tiny(
            GRPOConfig,
            tmp_path,
            **sections(tmp_path),
            environment={"name": f"{__name__}:{agent.__name__}"},
            sampling={"max_new_tokens": 1500 if agent is sdk_responses else 160, "n": 4},
            run={"steps": 1},
            batch={"prompts": 2},
            eval={"items": 0},
        )
    )
    (row,) = metrics_rows(run)
    assert not RECORDER.refusals
    assert row[metrics.SESSIONS_FAILED] == 0
    assert (row[metrics.SESSIONS_TURNS], row[metrics.SESSIONS_ROWS]) == (2, 8)  # a row for each of eight sessions
    assert row[metrics.SESSIONS_SPLITS] == row[metrics.SESSIONS_UNRECOGNIZED] == 0
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert row[metrics.GRAD_NORM] > 0
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pylist()
    by_session = groupby(sorted(RECORDER.exchanges, key=lambda one: one.session), key=lambda one: one.session)
    sessions = [[*exchanges] for _, exchanges in by_session]
    assert len(sessions) == 8 and all(len(exchanges) == 2 for exchanges in sessions)
    trained = Counter(tuple(entry["turn_tokens"]) for entry in table)
    assert trained == Counter(tuple(one.count for one in exchanges) for exchanges in sessions)
    if all(one.ids for one in RECORDER.exchanges):
        wire = Counter(tuple(id for one in exchanges for id in one.ids) for exchanges in sessions)
        assert Counter(tuple(entry["tokens"]) for entry in table) == wire
        model = load_model(build_config(ModelConfig, sections(tmp_path)["model"]))
        check_logprobs(model, RECORDER.exchanges)


@pytest.mark.parametrize("agent", CASES)
def test_an_agent_of_a_library_asks_a_model_that_is_served(agent: Any, tmp_path: Path) -> None:
    config = build_config(InferenceConfig, {**sections(tmp_path), "sampling": {"max_new_tokens": 160}})
    with serve(config) as client:
        asyncio.run(agent({"prompt": "12="}, client))
        assert not RECORDER.refusals
        assert len(RECORDER.exchanges) == 2
        check_logprobs(load_model(config.model), RECORDER.exchanges)


@dataclass(frozen=True)
class Door:
    """What an agent knows of a model."""

    base_url: str
    api_key: str = TOKEN
    model: str = "tiny"


@contextmanager
def serve(config: InferenceConfig) -> Iterator[Door]:
    with (
        podium.connect("inline") as cluster,
        served(config, cluster, model="tiny", token=TOKEN) as model,
    ):
        yield Door(f"{model.url}/v1")


def check_logprobs(model: Any, exchanges: Sequence[Exchange]) -> None:
    """Check that the log-probabilities of the wire are the model's, where no form left tokens out."""
    free = [one for one in exchanges if one.ids and one.is_free]
    assert all(len(one.logprobs) == len(one.ids) == one.count for one in exchanges if one.ids)
    for one in free:
        with torch.no_grad():
            logits = model(torch.tensor([[*one.prompt, *one.ids]])).logits[0, len(one.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)
