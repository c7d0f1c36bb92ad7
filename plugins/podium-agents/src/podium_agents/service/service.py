"""Answers requests by the tokens of a source, and records conversations by the session that they name.

    messages ─▶ ids (bridged to what the session has recorded) ─▶ source ─▶ ids ─▶ text and tool calls
                                                                     └─▶ recorded as sampled

Nothing here knows HTTP: a package of the group ``podium.services`` does.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError, DataError
from podium.rollout.engines.stops import Decode, before_stop, count_to_stop, ends_now, find_stop
from podium.rollout.sampling import RequestParams, SamplingParams
from podium.rollout.tasks.messages import message_text
from podium.spelling import write_count
from podium.telemetry import Note, emit
from podium_agents.seeds import hash_seed
from podium_agents.service.answer_forms import conversation_grammar
from podium_agents.service.concurrency import Caller
from podium_agents.service.constraints import make_constraint
from podium_agents.service.grammars import Spelling
from podium_agents.service.histories import Departure, rename_results, tools_key
from podium_agents.service.request_bodies import WISHES, ChatRequest, Refusal, texts_of
from podium_agents.service.session_recording import RecordedCall, Sampled, Session
from podium_agents.service.session_store import SessionStore
from podium_agents.service.structured import AnswerGrammar, compile_grammars, read_rule, text_grammar
from podium_agents.service.tool_calls import CALL_ENDS, Reply, ToolCall

if TYPE_CHECKING:
    from podium_agents.service.budgets import Budget
    from podium_agents.service.chat_format import ChatFormat, Mark
    from podium_agents.service.constraints import Constraint
    from podium_agents.service.token_source import TokenSource

__all__ = ["UNWRITTEN", "Answer", "Asked", "Service", "cut_at_stop"]

_ALIASES: Final = 100  # names of models that are counted
_SEEDS: Final = 2**62
_MIXER: Final = 0x9E3779B97F4A7C15  # an odd number, so that the calls of a session get seeds that differ
UNWRITTEN: Final = 4
"""Of so many characters of a conversation with its names and numbers, one may be in the prompt."""
_MARK_COUNTS: Final = (1, 10, 100, 1000)  # of messages with a special token, at which a note tells of them
_MOST_BYTES: Final = 1 << 28  # of sessions that are remembered, where nobody closes them


@dataclass(frozen=True)
class Asked:
    """A prompt that is ready to be drawn from.

    Attributes:
        prompt: Its ids.
        params: How to draw, for one completion.
        seeds: One for each completion.
        name: The name of its session; "" for a request that names none.
        session: Where the calls are recorded; None for a request that names no session.
        messages: The conversation; () for a request of ids or text.
        tools: Its tools.
        options: The variables that the chat template got beside those of the configuration.
        special: Whether special tokens are in the text of the answer.
        continues: The call that the conversation continues.
        departure: Where the client has edited what the session recorded; None if it has not.
        stops: Texts that end an answer.
        caller: The request that it belongs to.
        constraint: What may be drawn, if not everything.
        top: How many of the most probable tokens are told at each place.
        exact: Whether equal requests with equal seeds get the same bits: somebody chose the seed.
        one_call: Whether an answer ends with its first call of a tool.
        has_form: Whether the request prescribes the form of an answer that is no call.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seeds: Sequence[int]
    caller: Caller
    name: str = ""
    session: Session | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    special: bool = False
    continues: RecordedCall | None = None
    departure: Departure | None = None
    stops: Sequence[str] = ()
    constraint: Constraint | None = None
    top: int = 0
    exact: bool = True
    one_call: bool = False
    has_form: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a conversation, or to a text.

    Attributes:
        message: The assistant's message, as the OpenAI API has it.
        finish_reason: "stop", "length" or "tool_calls".
        sampled: The sampled tokens of the answer.
        call: The call's record in the session; None without a session.
        stop: The text of the client that ended it; None if none did.
        start: The number of tokens that the pieces of its text have. The others write no text: calls, and ends.
    """

    message: Mapping[str, Any]
    finish_reason: str
    sampled: Sampled
    call: RecordedCall | None = None
    stop: str | None = None
    start: int = 0


class Service:
    """One model that answers requests.

    Args:
        source: Draws completions.
        form: Writes and reads conversations.
        tokenizer: Writes and reads plain text.
        model: The name of the model for clients.
        context: The most tokens of a prompt and its completion.
        stop_token_ids: The tokens that end an answer.
        stops: Texts that end every answer, beside those of a request.
        most_tokens: Requests that would exceed this number of tokens in flight are refused with status 429.
        rules: How training draws. Temperature, top-p and top-k of requests are replaced by these, because a step trains
            on one distribution, and ``max_new_tokens`` limits an answer. Requests must then belong to an open session,
            because other answers would be lost. None lets each request decide.

    Attributes:
        vocabulary: The number of ids that the tokenizer knows.
        overruled: How often a request asked for a parameter that ``rules`` replaced, by its name.
        aliases: How often a request of a run named another model than the policy, by this name.
        unrecognized: How many calls began a row because their history is not what the session has recorded.
    """

    def __init__(
        self,
        source: TokenSource,
        form: ChatFormat,
        tokenizer: Any,
        *,
        model: str,
        context: int,
        stop_token_ids: Sequence[int],
        most_tokens: int,
        rules: SamplingParams | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self.source, self.form, self.model, self.context, self.rules = source, form, model, context, rules
        self.tokenizer = tokenizer
        self.stop_token_ids, self.stops = tuple(stop_token_ids), tuple(stops)
        self.most_tokens = most_tokens
        self.vocabulary = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.sessions = SessionStore(_MOST_BYTES if rules is None else None, form)
        self.overruled: Counter[str] = Counter()
        self.unrecognized = 0
        self.aliases: Counter[str] = Counter()
        self._marks: dict[tuple[str, str], set[int]] = {}  # messages with a special token, by role and token
        self.created_s = int(time.time())
        self._seeds = itertools.count(time.time_ns() % _SEEDS)
        self._seeds_of: dict[str, itertools.count[int]] = {}

    def check_model(self, name: str) -> None:
        """Check the name of the model in a request. In training all names are the policy, since agents name the model
        that they were written for. Raises Refusal for a model that is not served."""
        if name in ("", self.model):
            return
        if self.rules is None:
            raise Refusal(404, f"the model {name!r} is not served here; this service has {self.model!r}", "model")
        if name in self.aliases or len(self.aliases) < _ALIASES:
            self.aliases[name] += 1

    @cached_property
    def spelling(self) -> Spelling:
        """The bytes of single tokens."""
        return Spelling(self.tokenizer)

    # -- texts and sessions ----------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, special tokens among them only where ``special`` is True."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def open_session(self, name: str, seed: int | None = None, budget: Budget | None = None) -> Session:
        """Return the session of this name. A new session is opened if there is none.

        Args:
            name: Name of the session in requests.
            seed: The seeds of its calls follow from this one, in the order in which they are asked.
            budget: What the session may use; None for that of before.
        """
        if seed is not None:
            self._seeds_of[name] = itertools.count(seed % _SEEDS, _MIXER)
        session = self.sessions.open(name)
        if self.rules is not None:
            self.source.admission.begin(name)
        session.budget = budget or session.budget
        return session

    def close_session(self, name: str) -> Session | None:
        """Return the record of the session, and forget it. Calls without an answer so far are refused."""
        self._seeds_of.pop(name, None)
        if self.rules is not None:
            self.source.end_session(name)
        session = self.sessions.pop(name)
        if session is not None:
            session.over = True
        return session

    def caller(self) -> Caller:
        """Return a new request. It holds at most half of the tokens that may be in flight."""
        return Caller(self.most_tokens // 2)

    def _session(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Session | None:
        if self.rules is None:
            if any(message["role"] == "assistant" for message in messages) and self.sessions.is_forgotten(name):
                raise Refusal(
                    410,
                    f"the session {name!r} was forgotten: a service remembers {_MOST_BYTES >> 20} MiB of sessions, and "
                    "this one was not used for the longest time. Go on under another session name, or without one; the "
                    "chat template then writes the conversation from its beginning",
                    code="session_forgotten",
                )
            return self.open_session(name) if name else None
        if session := self.sessions.get(name):
            return session
        what = f"the session {name!r} is not open" if name else "the request names no session"
        raise Refusal(404, f"{what}, so the answer would not be trained on; use the base_url that the run gave", "")

    # -- requests --------------------------------------------------------------------------------------------------

    def chat(self, request: ChatRequest, session: str = "", *, clips: bool = False, hints: bool = False) -> Asked:
        """Prepare a conversation. With ``clips``, an answer may have fewer tokens than it wants, down to one.

        With ``hints``, an effort of reasoning and the reasoning of a history are left out where the template writes
        none, since clients send them to any model. A run refuses such a history all the same.

        Raises:
            Refusal: The template cannot write the conversation, no room is left for an answer, or the session does not
                exist.
        """
        tools = request.tools or []
        if request.tool_choice == "none":
            tools = []
        options = self.options_of(request, hints=hints)
        if hints and self.rules is None and not session:
            request = request.model_copy(update={"messages": self.form.drop_reasoning(request.messages)})
        recorded = self._session(session, request.messages)
        self.check_length(map(message_text, request.messages), session)
        self.check_length(texts_of([request.messages, tools, request.chat_template_kwargs]), session, UNWRITTEN)
        continues: RecordedCall | None = None
        departure: Departure | None = None
        prompt: list[int] | None = None
        try:
            form = self.form.with_options(options)
            if recorded is not None:
                continues, departure = recorded.recognize(request.messages, tools, options)
            new = request.messages[0 if continues is None else len(continues.messages) :]
            if continues is not None:
                last = len(continues.messages) - 1
                new = rename_results(new, request.messages[last], continues.messages[last])
            form.check(
                () if continues is None else continues.messages,
                new if recorded is None else recorded.without_said(new),
                tools,
            )
            if tools:
                form.check_calls()
            self._count_marks(form.find_marks(new))
            if recorded is not None and continues is not None and continues.tools == tools_key(tools, options):
                messages_before = continues.messages
                recorded_ids = recorded.ids_of(continues)
                start = next(turn.start for turn in recorded.rows[continues.row].turns if turn.call == continues.number)
                ends = self.stop_token_ids
                prompt = form.bridge(recorded_ids[:start], recorded_ids[start:], messages_before, new, tools, ends=ends)
            prompt = form.prompt(request.messages, tools) if prompt is None else prompt
        except (ConfigError, DataError) as error:
            raise Refusal(400, str(error), "messages") from None
        except RecursionError:
            raise Refusal(400, "the messages or tools are nested too deeply to be written", "messages") from None
        limit = request.limit
        limit = min(limit, max(1, self.context - len(prompt))) if limit and clips else limit
        form = self.form
        grammar = conversation_grammar(request, tools, form.forms, lambda: form.opens_reasoning(prompt), form.grammars)
        question = self.ask(prompt, request, limit, stop=request.stop_token_ids, session=session, grammar=grammar)
        return replace(
            question,
            session=recorded,
            messages=request.messages,
            tools=tools,
            options=options,
            special=not request.skip_special_tokens,
            continues=continues,
            departure=departure,
            top=request.top_logprobs,
            one_call=request.parallel_tool_calls is False,
            has_form=read_rule(request.response_format, request.structured_outputs) is not None,
        )

    def _count_marks(self, marks: Iterable[Mark]) -> None:
        """Emit a note about messages that have a special token: at the first message of a role with this token, and at
        the 10th, 100th and 1,000th that says something else."""
        for mark in marks:
            texts = self._marks.setdefault((mark.role, mark.name), set())
            before = len(texts)
            if before < _MARK_COUNTS[-1]:
                texts.add(hash(mark.text))
            if len(texts) > before and len(texts) in _MARK_COUNTS:
                emit(Note(mark.describe(len(texts))))

    def options_of(self, request: ChatRequest, *, hints: bool = False) -> dict[str, Any]:
        """The variables that a request gives to the chat template. Raises Refusal for an effort or a switch of thinking
        that nothing reads, unless it is a hint."""
        effort, thinking = request.reasoning_effort, request.thinking
        options = self.form.effort(effort, thinking)
        reads_switch = "enable_thinking" in options
        reads_effort = "reasoning_effort" in options or (reads_switch and thinking is None)
        for name, wish, is_read in (
            ("reasoning_effort", effort, reads_effort),
            ("thinking", thinking, reads_switch),
        ):
            if wish is None or is_read:
                continue
            if self.rules is None and not hints:
                message = f"{name}: the chat template reads no such variable; leave it out"
                raise Refusal(400, message, name, "unsupported")
            self.overruled[name] += 1
        return {**options, **request.chat_template_kwargs}

    def ask(
        self,
        prompt: Sequence[int],
        sampling: Any,
        limit: int | None,
        *,
        stop: Sequence[int] | None,
        session: str = "",
        grammar: AnswerGrammar | None = None,
    ) -> Asked:
        """Prepare ids. ``sampling`` has temperature, top_p, top_k, n and seed, and may have texts that end an answer.
        ``grammar`` is that of a conversation's answer; a text's is in ``sampling``.

        Raises:
            Refusal: The prompt leaves no room for an answer, or too many tokens are in flight.
        """
        room = self.context - len(prompt)
        if self.rules is not None:
            limit = min(limit or room, self.rules.max_new_tokens, max(room, 1))
        if room < 1 or (limit is not None and limit > room):
            wanted = f" and max_tokens is {limit}" if limit is not None else ""
            raise self._full(f"the prompt has {write_count(len(prompt), 'token')}{wanted}", session)
        if named := self.sessions.get(session):
            limit = named.budget.begin(len(prompt), sampling.n, limit)
        texts = getattr(sampling, "stops", ())
        if hasattr(sampling, "stops") and (last := max(stop or (), default=0)) >= self.vocabulary:
            where = f"stop_token_ids has {last}, and the vocabulary has {self.vocabulary} tokens"
            raise Refusal(400, f"{where}: take the ids of this model's tokenizer", "stop_token_ids")
        stops = (*self.stop_token_ids, *(stop or ()), *self.form.find_stop_tokens(texts))
        try:
            params = self._params(sampling, limit or room, stops)
        except ConfigError as error:
            raise Refusal(400, str(error)) from None
        size = sampling.n * (len(prompt) + (limit or 0))
        if self.source.in_flight and self.source.in_flight + size > self.most_tokens:
            raise Refusal(429, "too many tokens are in flight: try again later", code="overloaded")
        session_seeds, numbers = self._seeds_of.get(session), range(sampling.n)
        if sampling.seed is not None and self.rules is None:
            seeds, exact = [sampling.seed, *(hash_seed(sampling.seed, f"choice {n}") for n in numbers[1:])], True
        elif session_seeds is not None:
            seeds, exact = [next(session_seeds) for _ in numbers], True
        else:
            seeds, exact = [next(self._seeds) * 1_000_003 for _ in numbers], False
        constraint = make_constraint(
            sampling.logit_bias or {},
            grammar or text_grammar(sampling, self.form.grammars),
            vocabulary=self.vocabulary,
            training=self.rules is not None,
        )
        seeds = [seed % _SEEDS for seed in seeds]
        return Asked(
            prompt, params, seeds, self.caller(), name=session, constraint=constraint, exact=exact,
            stops=(*texts, *self.stops) if hasattr(sampling, "stops") else (),
        )  # fmt: skip

    async def prepare(self, *asked: Asked) -> None:
        """Compile the grammars of requests, without which none of them is drawn. Raises Refusal if one is wrong."""
        await compile_grammars([question.constraint for question in asked])

    def check_length(self, texts: Iterable[str], session: str = "", unwritten: int = 1) -> None:
        """Raise Refusal for vast texts, which would hold up others. The prompt has one character in ``unwritten``."""
        if self.form.is_vast((characters := sum(map(len, texts))) // unwritten, self.context):
            raise self._full(f"the prompt has {characters} characters", session)

    def _full(self, what: str, session: str) -> Refusal:
        if named := self.sessions.get(session):
            named.full = True
        remedy = "shorten the messages or lower max_tokens"
        message = f"{what}; the model's context has {self.context} tokens: {remedy}"
        return Refusal(400, message, "messages", "context_length_exceeded")

    def _params(self, sampling: Any, limit: int, stops: tuple[int, ...]) -> SamplingParams:
        rules = self.rules
        if rules is None:
            values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
            if sampling.min_p:
                return RequestParams(max_new_tokens=limit, stop_token_ids=stops, min_p=sampling.min_p, **values)
            return SamplingParams(max_new_tokens=limit, stop_token_ids=stops, **values)
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(sampling, name) or 0
            self.overruled[name] += name in sampling.model_fields_set and max(0, value) != getattr(rules, name)
        self.overruled["seed"] += sampling.seed is not None  # completions of one prompt are to differ
        for name, value in (sampling.model_extra or {}).items():
            self.overruled[name] += name in WISHES and value not in WISHES[name]
        rules = replace(rules, stop=()) if isinstance(rules, RequestParams) else rules  # the service looks for texts
        return replace(rules, max_new_tokens=limit, n=1, stop_token_ids=stops)

    async def most_probable(self, asked: Asked, drawn: Sampled, first: int = 0) -> list[list[tuple[int, float]]]:
        """Return for each drawn token from ``first`` on the most probable ones with their log-probabilities, among
        those that top-p and top-k kept; none where other weights have drawn the token. Raises Refusal if the service
        cannot compute them."""
        try:
            scored = await self.source.score(
                [*asked.prompt, *drawn.ids], first=len(asked.prompt) + first, top=asked.top,
                temperature=asked.params.temperature or 1.0, session=asked.name,
            )  # fmt: skip
        except ConfigError as error:
            raise Refusal(400, str(error), "top_logprobs", "unsupported") from None
        shifts = [sampled - score for sampled, score in zip(drawn.logprobs[first:], scored.logprobs, strict=True)]
        kept = drawn.kept[first:] if drawn.kept else [None] * len(shifts)
        return [
            [(token, logprob + shift) for token, logprob in top if ids is None or token in ids]
            if version == scored.version
            else []
            for top, shift, ids, version in zip(scored.top, shifts, kept, drawn.versions[first:], strict=True)
        ]

    async def with_top(self, asked: Asked, drawn: Sampled) -> Sampled:
        """A completion with the most probable tokens, before it is recorded: what is refused is not trained on."""
        return replace(drawn, top=await self.most_probable(asked, drawn)) if asked.top and drawn.ids else drawn

    # -- answers ---------------------------------------------------------------------------------------------------

    async def draw(self, asked: Asked, number: int = 0) -> Sampled:
        """Draw completion ``number`` of what was asked, up to a text that ends it.

        Raises:
            Refusal: The prompt does not fit the model.
            GenerationError: No token can be drawn.
        """
        async with aclosing(self.draw_pieces(asked, number, tokens=bool(asked.stops))) as pieces:
            async for piece in pieces:
                if piece.finish_reason:
                    return await self.with_top(asked, piece)
        raise AssertionError("a source ends with all of a completion")

    async def answer(self, asked: Asked, number: int = 0) -> Answer:
        """Draw completion ``number`` of a conversation, and record it. Raises as :meth:`draw`."""
        (answer,) = self.read(asked, [await self.draw(asked, number)])
        return answer

    def read(self, asked: Asked, drawn: Sequence[Sampled]) -> list[Answer]:
        """Return the answers that completions of a conversation are. All of them are recorded, or none.

        Raises:
            Refusal: The session is over.
        """
        if asked.session is not None and asked.session.over:
            raise Refusal(
                404, f"the session {asked.name!r} ended before this answer came, so the answer is not trained on"
            )
        answers = [self._answer(asked, sample) for sample in drawn]
        if asked.session is None:
            return answers
        record = partial(
            asked.session.record, asked.prompt, tools=asked.tools, options=asked.options,
            continues=asked.continues, departure=asked.departure,
        )  # fmt: skip
        before = asked.session.unrecognized
        calls = [
            record(answer.sampled, (*asked.messages, answer.message), stop_text=answer.stop or "") for answer in answers
        ]
        self.unrecognized += asked.session.unrecognized - before
        self.sessions.keep(asked.session)
        return [replace(answer, call=call) for answer, call in zip(answers, calls, strict=True)]

    async def draw_pieces(self, asked: Asked, number: int, *, tokens: bool = True) -> AsyncGenerator[Sampled]:
        """Yield what was sampled so far, again and again, without a reason to finish; at last all of the completion."""
        ids, logprobs, versions = list[int](), list[float](), list[int]()
        await self.prepare(asked)
        drawing = self.source.stream(
            asked.prompt, asked.params, asked.seeds[number], session=asked.name, tokens=tokens, caller=asked.caller,
            **({} if asked.constraint is None else {"constraint": asked.constraint}), exact=asked.exact,
        )  # fmt: skip
        size = len(asked.prompt) + asked.params.max_new_tokens
        async with self.sessions.in_use(asked.session), asked.caller.hold(size), aclosing(drawing) as events:
            try:
                async for event in events:
                    if isinstance(event, Sampled):
                        yield self._cut(asked, event)
                        return
                    ids += event.token_ids
                    logprobs += event.logprobs
                    versions += [event.version] * len(event.token_ids)
                    new = len(event.token_ids)
                    recorded = asked.params.filtered or asked.constraint is not None  # with the last event alone
                    if asked.stops and not recorded and ends_now(ids, new, asked.stops, self.decode):
                        yield self._cut(asked, Sampled(ids, logprobs, versions, "stop", reused=event.reused))
                        return
                    yield Sampled(ids, logprobs, versions, "", reused=event.reused)
            except ConfigError as error:
                raise Refusal(400, str(error)) from None

    def _cut(self, asked: Asked, drawn: Sampled) -> Sampled:
        """What was sampled up to a text that ends it, and up to the end of the first call, where the request wants no
        more than one."""
        drawn = cut_at_stop(drawn, asked.stops, self.decode)
        if not asked.one_call or len(every := self._read_calls(asked, drawn.ids)) < 2:
            return drawn
        count = len(drawn.ids)  # calls in one list are there at once
        for end, token_id in enumerate(drawn.ids, 1):
            if not self.decode([token_id], special=True).rstrip().endswith(("}", "]", ">")):
                continue
            calls = self._read_calls(asked, drawn.ids[:end])
            if len(calls) > 1:
                break
            is_whole = calls == every[:1]
            if is_whole and self.decode(drawn.ids[:end], special=True).rstrip().endswith(CALL_ENDS):
                count = end
                break
            count = min(count, end) if is_whole else count  # of forms without an end, or where it is still to come
        return drawn if count == len(drawn.ids) else replace(drawn.first(count), finish_reason="stop")

    def _read_calls(self, asked: Asked, ids: Sequence[int]) -> list[ToolCall]:
        return [*self.parse(asked, ids).tool_calls]

    def parse(self, asked: Asked, ids: Sequence[int], *, partial: bool = False) -> Reply:
        """Return what sampled ids say in answer to a conversation: text, reasoning and calls; with ``partial``, more
        ids follow."""
        form = {"special": asked.special, "has_form": asked.has_form, "partial": partial}
        return self.form.parse(asked.prompt, ids, asked.tools, **form)

    def _answer(self, asked: Asked, drawn: Sampled) -> Answer:
        reply = self.parse(asked, drawn.ids)
        reply = replace(reply, tool_calls=reply.tool_calls[:1]) if asked.one_call else reply
        content = before_stop(reply.content, asked.stops)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if reply.tool_calls else "")}
        if reply.reasoning is not None:
            message["reasoning_content"] = before_stop(reply.reasoning, asked.stops)
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.tool_calls
            ]
        reason = "tool_calls" if reply.tool_calls and drawn.finish_reason == "stop" else drawn.finish_reason
        last = self.decode(drawn.ids[-1:], special=True) if asked.stops and drawn.finish_reason == "stop" else ""
        text = find_stop(reply.reasoning or "", asked.stops) or find_stop(reply.content, asked.stops)
        stop = text or (last if last in asked.stops else None)
        return Answer(message, reason, drawn, stop=stop)


def cut_at_stop(drawn: Sampled, stops: Sequence[str], decode: Decode) -> Sampled:
    """What was sampled up to the token that completes one of ``stops``; what came after it nobody has read."""
    count = count_to_stop(drawn.ids, stops, decode)
    return drawn if count is None else replace(drawn.first(count), finish_reason="stop")
