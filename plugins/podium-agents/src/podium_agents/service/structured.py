"""Structured output: from ``response_format`` and ``structured_outputs`` of a request to a grammar of its answer.

A rule is a part of a grammar in the form of Lark that ``llguidance`` reads. Errors name the parameter, and within a
JSON schema the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError
from podium.plain_values import explain_json
from podium_agents.service.request_bodies import Refusal

if TYPE_CHECKING:
    from podium_agents.service.constraints import Constraint, Guide
    from podium_agents.service.grammars import Grammars

__all__ = ["AnswerGrammar", "Rule", "call_rules", "compile_grammars", "read_rule", "schema_rule", "text_grammar"]

_SPACES: Final = r"[ \t\r\n]{0,40}"
"""White space within JSON. Without a bound, a model may write nothing else up to its last token."""
_PROBES: Final = 256  # parts of a schema that are compiled to find the one that is wrong
_MOST_DEPTH: Final = 64  # of a schema
_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
_IN_ONE: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_IN_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SIGNS: Final = {"object": "{}", "array": "[]", "string": '"', "null": "null"}


@dataclass(frozen=True)
class Rule:
    """What an answer must be.

    Attributes:
        lark: The right-hand side of a rule.
        param: The parameter that asks for it.
        schema: The JSON schema, if it is one.
    """

    lark: str
    param: str
    schema: Any = None


def schema_rule(schema: Any, param: str) -> Rule:
    """Return the rule for JSON of a schema.

    Raises:
        Refusal: It is no JSON schema, or nested too deeply.
    """
    if not isinstance(schema, Mapping | bool):
        raise Refusal(400, f"{param}: a JSON schema is an object, not {type(schema).__name__}", param)
    if (path := _find_deep(schema)) is not None:
        raise Refusal(400, f"{param}{path}: the schema is nested more than {_MOST_DEPTH} deep", param)
    return Rule(f"%json {_add_spacing(schema)}", param, schema)


def read_rule(response_format: Any, structured_outputs: Any) -> Rule | None:
    """Return what a request wants its answer to be; None for any text.

    Raises:
        Refusal: The request asks for something that is not known, or for two things.
    """
    if response_format not in (None, {"type": "text"}) and structured_outputs:
        raise Refusal(400, "response_format and structured_outputs both name a form: leave one out", "response_format")
    if structured_outputs:
        return _read_structured(structured_outputs)
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_rule({"type": "object"}, "response_format")
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        if not isinstance(holder, Mapping) or "schema" not in holder:
            raise Refusal(400, "response_format.json_schema.schema is missing", "response_format")
        return schema_rule(holder["schema"], "response_format.json_schema.schema")
    raise Refusal(
        400,
        f"response_format.type = {str(kind)[:80]!r}: this service knows text, json_object and json_schema",
        "response_format",
        "unsupported",
    )


def _read_structured(wishes: Any) -> Rule:
    if not isinstance(wishes, Mapping):
        raise Refusal(400, "structured_outputs is no object", "structured_outputs")
    wishes = {name: value for name, value in wishes.items() if value is not None and value is not False}
    if unknown := sorted(map(str, wishes.keys() - {*_KINDS})):
        raise Refusal(
            400, f"structured_outputs.{unknown[0]}: this service knows {', '.join(_KINDS)}", "structured_outputs"
        )
    if len(wishes) != 1:
        raise Refusal(400, f"structured_outputs has {sorted(wishes)}: give one of these", "structured_outputs")
    ((kind, value),) = wishes.items()
    param = f"structured_outputs.{kind}"
    if kind == "json_object":
        return schema_rule({"type": "object"}, param)
    if kind == "json":
        return schema_rule(_read_json(value, param) if isinstance(value, str) else value, param)
    return _read_texts(kind, value, param)


def _read_json(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"{param} is not JSON: {explain_json(error, text)}", param) from None


def _read_texts(kind: str, value: Any, param: str) -> Rule:
    """The rule of a choice, a regular expression or a grammar."""
    if kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)):
            raise Refusal(400, f"{param} is a list of texts, none of them empty", param)
        return Rule(" | ".join(json.dumps(text, ensure_ascii=False) for text in value), param)
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"{param} is a text", param)
    if kind == "regex":
        return Rule(f"/{_escape_slashes(value)}/", param)
    return Rule("%lark {\n" + value + "\n}", param)


def call_rules(choice: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Rule]:
    """Return, by name of a function, the rule of its arguments: of all tools, or of the one that ``choice`` names."""
    wanted = choice["function"]["name"] if isinstance(choice, Mapping) else None
    rules: dict[str, Rule] = {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        if wanted in (None, function["name"]):
            schema = {"type": "object", **(function.get("parameters") or {})}
            rules[function["name"]] = schema_rule(schema, f"tools.{index}.function.parameters")
    return rules


class AnswerGrammar:
    """The grammar of an answer, which is compiled when it is first needed.

    Args:
        grammars: Compiles it.
        text: The grammar.
        rules: The rules in it, for errors.
    """

    def __init__(self, grammars: Grammars, text: str, rules: tuple[Rule, ...] = ()) -> None:
        self._grammars, self.text, self._rules = grammars, text, rules
        self._compiled: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled is not None

    def compile(self) -> None:
        """Compile it, which may take seconds.

        Raises:
            Refusal: It is wrong, too large, or the vocabulary cannot write it.
        """
        try:
            for rule in self._rules:
                if rule.schema is not None:
                    _check_writable(self._grammars, rule)
            self._compiled = self._grammars.compile(self.text)
        except ConfigError as error:
            raise self._explain(error) from None

    def begin(self, stop_token_ids: Any) -> Guide:
        """As :meth:`.Grammar.begin`."""
        if not self.is_ready:
            self.compile()
        compiled: Any = self._compiled
        return compiled.begin(stop_token_ids)

    def _explain(self, error: ConfigError) -> Refusal:
        for rule in self._rules:
            try:
                self._grammars.compile(f"start: {rule.lark}")
            except ConfigError as wrong:
                with contextlib.suppress(ConfigError):  # it takes too long to find the place
                    mistake = None if rule.schema is None else _find_wrong(self._grammars, rule.schema)
                    path, reason = mistake or ("", str(wrong))
                    return Refusal(400, f"{rule.param}{path}: {_shorten_reason(reason)}", rule.param.partition(".")[0])
                return Refusal(400, f"{rule.param}: {_shorten_reason(str(wrong))}", rule.param.partition(".")[0])
        return Refusal(
            400, _shorten_reason(str(error)), self._rules[0].param.partition(".")[0] if self._rules else None
        )


def text_grammar(request: Any, grammars: Grammars) -> AnswerGrammar | None:
    """Return the grammar of a text that a request asks for; None for any text. Raises as :func:`read_rule`."""
    rule = read_rule(getattr(request, "response_format", None), request.structured_outputs)
    return None if rule is None else AnswerGrammar(grammars, f"start: {rule.lark}", (rule,))


async def compile_grammars(constraints: Sequence[Constraint | None]) -> None:
    """Compile the grammars of constraints in a thread. Raises Refusal if one is wrong."""
    for constraint in constraints:
        grammar = None if constraint is None else constraint.grammar
        if isinstance(grammar, AnswerGrammar) and not grammar.is_ready:
            await asyncio.to_thread(grammar.compile)


def _shorten_reason(reason: str) -> str:
    return reason.removeprefix("failed to compile JSON schema: ")


def _add_spacing(schema: Any) -> str:
    if isinstance(schema, Mapping):
        return json.dumps({"x-guidance": {"whitespace_pattern": _SPACES}, **schema})
    return json.dumps(schema)


def _escape_slashes(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    parts, escaped = list[str](), False
    for character in regex:
        parts.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(parts).replace("\n", "\\n")


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, each with its path."""
    if not isinstance(schema, Mapping):
        return
    for name in _IN_TABLES:
        if isinstance(table := schema.get(name), Mapping):
            yield from ((f".{name}.{key}", part) for key, part in table.items())
    for name in _IN_LISTS:
        if isinstance(parts := schema.get(name), list):
            yield from ((f".{name}.{index}", part) for index, part in enumerate(parts))
    yield from ((f".{name}", schema[name]) for name in _IN_ONE if isinstance(schema.get(name), Mapping | bool))


def _find_deep(schema: Any) -> str | None:
    """The path of a part of a schema that is nested too deeply."""
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(_MOST_DEPTH):
        level = [(path + more, part) for path, parent in level for more, part in _parts(parent)]
    return level[0][0][:200] if level else None


def _find_wrong(grammars: Grammars, schema: Any) -> tuple[str, str] | None:
    """The path of the smallest part of a schema that cannot be compiled, and why; None if that is all of it."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema} if schema else {}
    mistake, parent = None, schema
    while parts := [(path, part) for path, part in _parts(parent) if part is not False][:_PROBES]:
        probes = [{**definitions, **part} if isinstance(part, Mapping) else part for _, part in parts]
        errors = grammars.find_errors([f"start: %json {json.dumps(probe)}" for probe in probes])
        index = next((index for index, error in enumerate(errors) if error), None)
        if index is None:
            break
        path, parent = parts[index]
        mistake = ((mistake[0] if mistake else "") + path, errors[index])
    return mistake


def _check_writable(grammars: Grammars, rule: Rule) -> None:
    """Raise ConfigError for a text of a schema that a vocabulary of a few characters cannot write."""
    if grammars.writes_everything:
        return
    pending = [(rule.param, rule.schema)]
    while pending:
        path, schema = pending.pop()
        pending += [(path + more, part) for more, part in _parts(schema)]
        if not isinstance(schema, Mapping):
            continue
        kind = schema.get("type")
        texts = [("", _SIGNS[kind])] if isinstance(kind, str) and kind in _SIGNS else []
        if isinstance(properties := schema.get("properties"), Mapping):
            texts += [(f".properties.{name}", json.dumps(name, ensure_ascii=False) + ":") for name in properties]
        if isinstance(values := schema.get("enum"), list):
            texts += [(f".enum.{index}", json.dumps(value, ensure_ascii=False)) for index, value in enumerate(values)]
        if "const" in schema:
            texts.append((".const", json.dumps(schema["const"], ensure_ascii=False)))
        for more, text in texts:
            if not grammars.can_write(text):
                raise ConfigError(f"{path}{more}: the vocabulary has no tokens for {text[:80]!r}")
