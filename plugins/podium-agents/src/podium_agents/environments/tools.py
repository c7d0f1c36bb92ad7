"""Functions that the model may call. The annotations make the schema, and the docstring describes it.

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: The first number.
        '''
        return a + b

    reply = await converse(client, messages, tools=[add])

Whatever goes wrong in a tool is said to the model, in the message that answers its call: an unknown name, arguments
that do not fit, an error that the function raises, and a call that takes too long. The session goes on. Only a
SessionError fails it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo

from podium.errors import ConfigError
from podium.exceptions import describe_error, read_text
from podium.plain_values import explain_json
from podium_agents.environments.calls import in_thread, is_cancelled, session_counts
from podium_agents.environments.contract import SessionError
from podium_agents.environments.tool_process import FailedInProcess, in_process, write_value

__all__ = ["Tool", "ToolError", "Toolbox", "tool"]

_MOST_SHOWN: Final = 2000  # characters of an error that the model reads


class ToolError(Exception):
    """An error whose text a tool shows to the model."""


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name: Its name.
        description: The description that the model reads.
        parameters: Its arguments, as a JSON schema.
        run: The function that takes the arguments and returns the result. It may raise any exception.
        time_limit_s: Limit of a call, in seconds. None for none but the session's.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    time_limit_s: float | None = 30.0

    @property
    def schema(self) -> dict[str, Any]:
        """The tool, as the OpenAI API has it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool(
    function: Callable[..., Any],
    *,
    name: str = "",
    time_limit_s: float | None = 30.0,
    process: bool = False,
    env: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> Tool:
    """Return a function as a tool.

    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool(add).schema["function"]["parameters"]["required"]
    ['a']

    Args:
        function: A function or a coroutine function, with annotations. A function that is no coroutine function runs in
            a thread. Its docstring may have a section "Args:" with a line for each parameter. A description in a
            pydantic ``Field``, in ``Annotated`` or as the default, comes before it.
        name: The name for the model; the function's own by default.
        time_limit_s: A call that takes longer is answered with an error. The call's thread cannot be ended and
            continues. None for no limit but the session's.
        process: Whether each call gets a process of its own, which is killed at the end with whatever it has started.
            Each call then takes about 0.2 s more, and changes that the function makes in memory are lost.
        env: Environment variables that this process gets although they look like secrets, by name. It gets no others
            that do.
        given: Arguments that the model neither sees nor sets, such as the state of a session.

    Raises:
        ConfigError: A parameter has no annotation, or one that has no JSON schema, or its kind is ``*args`` or
            ``**kwargs``. Or Python runs without docstrings.
    """
    fixed, label = dict(given or {}), name or getattr(function, "__name__", type(function).__name__)
    if sys.flags.optimize > 1:
        raise ConfigError(
            f"the tool {label!r} is described to the model by its docstring, and Python runs without docstrings: start "
            "it without -OO, and set PYTHONOPTIMIZE to at most 1"
        )
    description, about = _describe_parameter(inspect.getdoc(function) or "")
    model = _arguments_model(function, label, fixed, about)
    schema = model.model_json_schema()
    schema.pop("title", None)
    for entry in schema.get("properties", {}).values():
        entry.pop("title", None)
    schema.pop("additionalProperties", None)

    async def run(arguments: Mapping[str, Any]) -> Any:
        checked = model.model_validate(arguments)
        values = {name: getattr(checked, name) for name in type(checked).model_fields} | fixed
        if process:
            return await in_process(function, values, env)
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        result = await in_thread(function, **values)
        return await result if inspect.isawaitable(result) else result

    return Tool(label, description, {"properties": {}, **schema}, run, time_limit_s)


class Toolbox:
    """The tools of a conversation.

    Args:
        tools: Functions, and what :func:`tool` returns. No two have the same name.

    Raises:
        ConfigError: Two tools have the same name, or a function cannot be a tool.
    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        made_tools = [entry if isinstance(entry, Tool) else tool(entry) for entry in tools]
        twice = [name for name, count in Counter(made_tool.name for made_tool in made_tools).items() if count > 1]
        if twice:
            raise ConfigError(f"two tools are named {twice[0]!r}: give one of them another name by tool(f, name=...)")
        self._tools = {made_tool.name: made_tool for made_tool in made_tools}

    def __len__(self) -> int:
        return len(self._tools)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools, as the OpenAI API has them."""
        return [known_tool.schema for known_tool in self._tools.values()]

    async def answer(self, tool_calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Run the called tools one after the other, and return the messages with their results.

        In a session, ``client.counts`` gets the number of calls as "tool_calls", and of those that failed as
        "tool_errors". A thread that the session starts itself counts nothing, unless it runs in the session's context
        (``contextvars.copy_context().run``), as those of ``asyncio.to_thread`` do.

        Args:
            tool_calls: The tool calls of an assistant's message.

        Raises:
            SessionError: A tool raised it, alone or in a group of errors.
        """
        messages: list[dict[str, Any]] = []
        for call in tool_calls:
            text, failed = await self._answer_call(call.get("function") or {})
            content = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as file names may need it
            if (counts := session_counts.get()) is not None:
                counts.update(tool_calls=1, tool_errors=int(failed))
            messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": content})
        return messages

    async def _answer_call(self, function: Mapping[str, Any]) -> tuple[str, bool]:
        """The content of the message that answers a call, and whether the call failed."""
        name = str(function.get("name", ""))
        called_tool = self._tools.get(name)
        if called_tool is None:
            return f"error: there is no tool {name[:80]!r}; there are {', '.join(self._tools)}", True
        timer = asyncio.timeout(called_tool.time_limit_s)
        try:
            arguments = _arguments(function.get("arguments"))
            async with timer:
                return write_value(await called_tool.run(arguments)), False
        except ValidationError as error:
            return f"error: {name} cannot be called so: {_describe_problems(error)}", True
        except (ToolError, FailedInProcess) as error:
            return f"error: {read_text(error)}"[:_MOST_SHOWN], True
        except BaseException as error:  # SystemExit of a tool ends the call, not the run
            if _fails_session(error) or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
                raise
            if isinstance(error, TimeoutError) and timer.expired():
                return f"error: {name} took longer than {called_tool.time_limit_s:g} s", True
            return f"error: {describe_error(error)}"[:_MOST_SHOWN], True


def _fails_session(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(SessionError) is not None
    return isinstance(error, SessionError)


def _arguments(given: Any) -> Mapping[str, Any]:
    """The arguments of a call. Raises ToolError for what is no JSON object."""
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) or given is None else given
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are no valid JSON: {explain_json(error, given or '')}") from None
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments are {type(arguments).__name__}; expected a JSON object")
    return arguments  # pyright: ignore[reportUnknownVariableType]


def _describe_problems(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}" for problem in error.errors()[:5]
    ]
    return "; ".join(problems)[:_MOST_SHOWN]


def _describe_parameter(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of its function, and of each parameter."""
    lines, about, section, name = doc.splitlines(), dict[str, str](), "", ""
    sentences: list[str] = []
    for line in lines:
        bare = line.strip()
        if not line.startswith(" ") and bare.rstrip(":") in _SECTIONS and bare.endswith(":"):
            section = bare.rstrip(":")
        elif not section:
            sentences.append(line)
        elif section in ("Args", "Arguments", "Parameters") and bare:
            head, colon, rest = bare.partition(":")
            key = head.partition("(")[0].strip()
            if colon and key.isidentifier() and len(line) - len(line.lstrip()) <= 4:
                name = key
                about[name] = rest.strip()
            elif name:
                about[name] += f" {bare}"
    return "\n".join(sentences).strip(), about


_SECTIONS: Final = frozenset({"Args", "Arguments", "Parameters", "Returns", "Raises", "Yields", "Examples", "Example"})


def _make_field(parameter: inspect.Parameter, about: str) -> tuple[Any, Any]:
    """A parameter as a field of a model: its annotation and its default. What the docstring says of it is ``about``; a
    description in a ``Field`` is written for the schema, and comes first."""
    annotation, default = parameter.annotation, parameter.default
    infos = [info for info in (*getattr(annotation, "__metadata__", ()), default) if isinstance(info, FieldInfo)]
    if about and not any(info.description for info in infos):
        annotation = Annotated[annotation, Field(description=about)]
    if isinstance(default, FieldInfo):
        return annotation, default
    return annotation, Field(... if default is parameter.empty else default)


def _arguments_model(function: Callable[..., Any], label: str, fixed: Mapping[str, Any], about: dict[str, str]) -> Any:
    """A model of the arguments that the language model gives."""
    parameters = inspect.signature(function, eval_str=True).parameters
    if unknown := [name for name in fixed if name not in parameters]:
        raise ConfigError(f"the tool {label!r} has no parameter {unknown[0]!r}, which tool(..., given=...) names")
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.name in fixed:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the tool {label!r} has the parameter {parameter}: a model passes arguments by name, so write "
                "named parameters"
            )
        if parameter.annotation is parameter.empty:
            raise ConfigError(
                f"the tool {label!r} has the parameter {parameter.name!r} without an annotation: write its type"
            )
        fields[parameter.name] = _make_field(parameter, about.get(parameter.name, ""))
    try:
        model = create_model(f"{label}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise ConfigError(
            f"the tool {label!r} has an annotation without a JSON schema, use plain types: {error}"
        ) from None
    return model
