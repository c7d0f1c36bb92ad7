"""From YAML and dotted overrides to a typed configuration, and from any mistake to one clear error.

    YAML ── overrides (`--optim.lr 1e-4`) ──▶ nested dict ──▶ names checked here ──▶ types by pydantic ──▶ config

A section is a frozen stdlib dataclass that lives beside the class it configures; this module knows none of them. A root
class may carry ``RECIPE``, nested values that it prefers to its sections' own defaults; what the user gives wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import pydantic
import yaml

from podium.errors import ConfigError

__all__ = [
    "Key",
    "build_config",
    "config_to_dict",
    "config_to_yaml",
    "keys_of",
    "load_config",
    "parse_overrides",
    "read_values",
]

C = TypeVar("C")


class _Loader(yaml.SafeLoader):
    """Reads ``1e-4`` as a number, as YAML 1.2 and everybody does; PyYAML's own reads it as text. Refuses a key that is
    there twice, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Key:
    """One setting: ``path`` as in "optim.lr", what it takes, its default, and its one line of documentation."""

    path: str
    expects: str
    default: Any
    doc: str


def load_config(cls: type[C], path: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """Read ``path`` (YAML, or defaults alone if None), apply ``overrides`` as on a command line, check, build.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, mistyped, out of range or contradicts another; names
            the key's full path, its value, what was expected and the nearest valid name.
    """
    values = read_values(cls, path, overrides)
    typed = [dotted for dotted, _ in parse_overrides(cls, overrides)]
    return build_config(cls, values, source="" if path is None else str(path), typed=typed)


def read_values(cls: type, path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The nested values of :func:`load_config`, unchecked but for their syntax."""
    values = _read_yaml(Path(path)) if path is not None else {}
    for dotted, value in parse_overrides(cls, overrides):
        _put(values, dotted, value)
    return values


def build_config(cls: type[C], values: Mapping[str, Any], source: str = "", typed: Sequence[str] = ()) -> C:
    """A checked ``cls`` from nested ``values``.

    Args:
        source: the file that they are from; named in errors about keys that are not among ``typed``.
        typed: dotted paths that were given on the command line.

    Raises:
        ConfigError: with every mistake found.
    """

    def placed(path: str, line: str) -> str:
        from_file = source and not any(f"{dotted}.".startswith(f"{path}.") for dotted in typed)
        return f"{source}: {line}" if from_file else line

    unknown = [placed(path, line) for path, line in _unknown_keys(cls, values)]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return pydantic.TypeAdapter(cls).validate_python(_merged(getattr(cls, "RECIPE", {}), values))
    except pydantic.ValidationError as error:
        found = [_explain(cls, cast("dict[str, Any]", one)) for one in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(placed(path, line) for path, line in found))) from None


def parse_overrides(cls: type, arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """``["--optim.lr", "1e-4", "--run.name=x"]`` as pairs of a dotted path and a value.

    Values are read as YAML, except where the key takes text: there ``007`` stays ``007``. ``null`` means None.

    Raises:
        ConfigError: something that is no ``--key``, or a key without a value.
    """
    pairs: list[tuple[str, Any]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"{argument!r} is no setting: write --section.key value, as in --optim.lr 1e-4")
        dotted, equals, text = argument[2:].partition("=")
        dotted = dotted.replace("-", "_")
        if not equals:
            if not rest or _looks_like_key(rest[0]):
                raise ConfigError(f"--{dotted} has no value: write --{dotted} VALUE")
            text = rest.pop(0)
        pairs.append((dotted, _parse_value(_type_at(cls, dotted), text, dotted)))
    return pairs


def keys_of(cls: type) -> list[Key]:
    """Every leaf key of a configuration class, in order, with the default it has there."""
    return list(_keys(cls, "", build_config(cls, {})))


def _keys(cls: type, prefix: str, defaults: object) -> Iterator[Key]:
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        kind = _hints(cls)[field.name]
        default = getattr(defaults, field.name, _default_of(field))
        if dataclasses.is_dataclass(section := _section_of(kind)):
            first, *rest = _keys(cast(type, section), path + ".", default)
            if default is None:
                first = dataclasses.replace(first, doc=f"{first.doc} {path} is off until a key of it is given")
            yield from (first, *rest)
        else:
            yield Key(path, _expected(kind), default, docs.get(field.name, ""))


def config_to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, as YAML can hold them."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def config_to_yaml(config: Any) -> str:
    """The configuration as YAML that :func:`load_config` reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True, default_flow_style=None)


# -- reading ---------------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded: object = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds {type(loaded).__name__}, and a configuration is a mapping of sections")
    return cast("dict[str, Any]", loaded)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    for name, below in base.items():
        above = over.get(name)
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            both[name] = _merged(cast("Mapping[str, Any]", below), cast("Mapping[str, Any]", above))
    return both


def _looks_like_key(text: str) -> bool:
    return text.startswith("--") and len(text) > 2 and text[2].isalpha()


def _parse_value(kind: Any, text: str, dotted: str) -> Any:
    arms = _arms(kind)
    if str in arms and not (type(None) in arms and text in ("null", "none", "None", "~")):
        return text
    try:
        value: object = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{dotted} {text!r} is not valid YAML: {error}") from None
    return None if value in ("none", "None") and type(None) in arms else value


def _put(values: dict[str, Any], dotted: str, value: object) -> None:
    *sections, last = dotted.split(".")
    for place, name in enumerate(sections):
        inner = values.get(name)
        if inner is None:
            inner = values[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--{dotted}: {'.'.join(sections[: place + 1])} is {inner!r}, which has no keys below it")
        values = cast("dict[str, Any]", inner)
    values[last] = value


def _type_at(cls: type, dotted: str) -> Any:
    kind: Any = cls
    for name in dotted.split("."):
        section = _section_of(kind)
        if not dataclasses.is_dataclass(section):
            return Any
        kind = _hints(cast(type, section)).get(name, Any)
    return kind


# -- checking --------------------------------------------------------------------------------------------------------


def _unknown_keys(
    cls: type, values: Mapping[str, Any], prefix: str = "", root: type | None = None
) -> Iterator[tuple[str, str]]:
    """The path of each unknown key, and what to say about it."""
    root = root or cls
    names = [field.name for field in dataclasses.fields(cls)]
    for name, value in values.items():
        section = _section_of(_hints(cls).get(name))
        if name not in names:
            hint = _suggest(root, prefix, str(name), names)
            yield f"{prefix}{name}", f"unknown key {prefix}{name} (value {value!r}){hint}"
        elif dataclasses.is_dataclass(section):
            if isinstance(value, Mapping):
                yield from _unknown_keys(
                    cast(type, section), cast("Mapping[str, Any]", value), f"{prefix}{name}.", root
                )
            elif not isinstance(value, cast(type, section)) and not (
                value is None and type(None) in _arms(_hints(cls)[name])
            ):
                inner = ", ".join(field.name for field in dataclasses.fields(section))
                yield f"{prefix}{name}", f"{prefix}{name} = {value!r}: expected a section with the keys {inner}"


def _suggest(root: type, prefix: str, name: str, siblings: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f": did you mean {prefix}{near[0]}?"
    leaves = {path.rpartition(".")[2]: path for path in _paths(root)}
    elsewhere = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    if elsewhere:
        return f": did you mean {leaves[elsewhere[0]]}?"
    return f": {prefix.rstrip('.') or 'the configuration'} has {', '.join(siblings)}"


def _paths(cls: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(cls):
        section = _section_of(_hints(cls)[field.name])
        if dataclasses.is_dataclass(section):
            yield from _paths(cast(type, section), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _explain(cls: type, error: Mapping[str, Any]) -> tuple[str, str]:
    """The path of one pydantic error, and what it says in our words."""
    path, kind = _locate(cls, error["loc"])
    raised = error.get("ctx", {}).get("error")
    if error["type"] == "value_error" and raised is not None:  # a section's own __post_init__
        message = str(raised)
        return path, message if not path or message.startswith(path) else f"{path}: {message}"
    value = error.get("input")
    if error["type"] == "missing":
        return path, f"{path} is missing: expected {_expected(kind)}"
    choices = [str(choice) for choice in _choices(kind)]
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return path, f"{path} = {value!r}: expected {_expected(kind)}{hint}"


def _locate(cls: type, loc: Sequence[str | int]) -> tuple[str, Any]:
    """The dotted path and the type that ``loc`` points at; pydantic's tags for the arms of a union are left out."""
    path: list[str] = []
    kind: Any = cls
    for part in loc:
        section = _section_of(kind)
        if not dataclasses.is_dataclass(section) or part not in _hints(cast(type, section)):
            break
        path.append(str(part))
        kind = _hints(cast(type, section))[str(part)]
    return ".".join(path), kind


# -- types in words --------------------------------------------------------------------------------------------------

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    Any: "a value",
}


def _expected(kind: Any) -> str:
    texts: list[str] = []
    for arm in _arms(kind):
        origin = typing.get_origin(arm)
        if origin is typing.Literal:
            texts.append("one of " + ", ".join(map(str, typing.get_args(arm))))
        elif origin is not None:
            items = [item for item in typing.get_args(arm) if item is not Ellipsis]
            is_list = origin in (list, tuple, Sequence) and items
            texts.append(f"a list with items of: {_expected(items[0])}" if is_list else _words(origin))
        else:
            texts.append(_words(arm))
    return " or ".join(dict.fromkeys(texts))


def _words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping"
    return getattr(kind, "__name__", str(kind))


def _arms(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) is typing.Annotated:
        return _arms(typing.get_args(kind)[0])
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _choices(kind: Any) -> list[Any]:
    literals = [arm for arm in _arms(kind) if typing.get_origin(arm) is typing.Literal]
    return [choice for arm in literals for choice in typing.get_args(arm)]


def _section_of(kind: Any) -> Any:
    """The dataclass that ``kind`` is, or is besides None."""
    found = [arm for arm in _arms(kind) if dataclasses.is_dataclass(arm)]
    return found[0] if found else None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The comment at the end of a field's line, or the lines right above it, or its entry in the class's docstring."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in_source(base)
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
    docs = {f.name: str(f.metadata["help"]) for f in dataclasses.fields(cls) if "help" in f.metadata}
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return docs
    above: list[str] = []
    field = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.NAME and token.start[1] == 4 and not field:
            field = token.string
        elif token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ").strip()
            if field:
                docs.setdefault(field, text)
            else:
                above.append(text)
        elif token.type == tokenize.NEWLINE:
            if field and above:
                docs.setdefault(field, " ".join(above))
            field, above = "", []
    return _docs_in_docstring(cls) | docs


def _docs_in_docstring(cls: type) -> dict[str, str]:
    """Entries ``name: text``, ``name, other: text`` with the lines indented below them."""
    docs: dict[str, str] = {}
    current: list[str] = []
    for line in (inspect.getdoc(cls) or "").splitlines():
        names, colon, text = line.strip().partition(":")
        named = [name.strip().strip("`") for name in names.split(",")]
        if colon and all(name in _hints(cls) for name in named):
            current = named
            docs |= dict.fromkeys(current, text.strip())
        elif line.startswith(" " * 8) and line.strip():
            docs |= {name: f"{docs[name]} {line.strip()}" for name in current}
        else:
            current = []
    return docs


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast("Sequence[Any]", value)]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
