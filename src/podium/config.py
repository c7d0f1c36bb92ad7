"""Configuration: sections of typed and checked keys, read from YAML and from dotted overrides.

    YAML ── overrides (`--optim.lr 1e-4`) ──▶ nested values ──▶ pydantic ──▶ sections

A section stands beside the class that it configures. Its fields are its keys; the text below a field is the key's help:

    @section("optim")
    class OptimConfig:
        \"\"\"AdamW with warm-up and decay.\"\"\"

        lr: float = Field(default=1e-5, ge=0, le=10)
        \"\"\"The peak learning rate.\"\"\"

``dataclasses.replace`` makes a changed copy, which is checked again.
"""

import dataclasses
import functools
import os
import re
import shlex
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast, dataclass_transform

import pydantic.dataclasses
import yaml
from pydantic import Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

from podium.answers import describe_word, explain_no_answers, load_answers, show_value
from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.key_types import arms_of, describe_expected, fields_of, locate_key, section_of
from podium.plain_values import TOO_MUCH, check_plain
from podium.secrecy import find_masked, mask, mask_command, remove_quotes, variable_of
from podium.spelling import nearest_spellings, suggest, words_of

C = TypeVar("C")

_named_keys: Final[dict[int, tuple[weakref.ref[object], tuple[str, ...]]]] = {}
"""By the id of a section that code of this process has made, the keys that it named. They are no attribute of the
section, because a copy is often made of all of these."""
_RULES = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Key(NamedTuple):
    """One key. ``path`` is dotted; ``expects`` says which values it takes; ``section`` is the help of its section."""

    path: str
    expects: str
    default: Any
    doc: str
    section: str


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, Field))
def section(path: str = "") -> Callable[[type[C]], type[C]]:
    """Make a class a section: a frozen, keyword-only dataclass whose values pydantic checks.

    The class may check how its keys fit together in ``__post_init__``, by raising ConfigError. Building the section
    raises ConfigError with every mistake found.

    Args:
        path: Name of the section in the configuration, as in "model.lora". Errors put it before the names of keys.
    """

    def decorate(cls: type[C]) -> type[C]:
        cast("Any", cls)._refuse_conversions = field_validator("*", mode="before")(_refuse_conversions)
        made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
        check = made.__init__

        @functools.wraps(check)
        def __init__(self: object, **values: Any) -> None:
            try:
                check(self, **_keep_preferred(made, values))
            except pydantic.ValidationError as error:
                raise ConfigError("\n".join(_mistakes(made, error, path))) from None
            _remember_keys(self, tuple(values))

        made.__init__, made.__reduce__ = __init__, _reduce_section
        return cast("type[C]", made)

    return decorate


def prefer(cls: Callable[..., C], **values: Any) -> C:
    """Make the default of a field that holds a section, with ``values`` in place of the section's own defaults.

    Keys that the user does not set keep these values, even if the user sets other keys of the section.
    """
    return Field(default_factory=functools.partial(cls, **values))


def load_config(
    cls: type[C], path: str | Path | None = None, overrides: Sequence[str] = (), content: bytes | None = None
) -> C:
    """Read ``path`` (YAML; None reads no file), apply ``overrides`` as on a command line, check and build.

    If ``cls`` has a method ``check_source``, it gets ``path`` and the keys of ``overrides``, and returns the result.
    ``content`` is that of the file, if it was read already.

    Raises:
        ConfigError: The file cannot be read, or a key is unknown, mistyped, out of range or contradicts another, or an
            override is none; the message has a line for each mistake, with the key's full path, its value, the values
            that it takes and the key that is meant, if that is known.
    """
    values = _read_yaml(Path(path), content) if path is not None else {}
    pairs, mistakes = _read_overrides(cls, overrides)
    for dotted, value in pairs:
        _set_value(values, dotted, value)
    typed = [dotted for dotted, _ in pairs]
    try:
        config = build_config(cls, fill_masked(values), source=str(path or ""), typed=typed)
    except ConfigError as error:
        raise ConfigError("\n".join([*mistakes, str(error)])) from None
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    check_source: Callable[[Path, Sequence[str]], C] | None = getattr(config, "check_source", None)
    return config if path is None or check_source is None else check_source(Path(path), typed)


def fill_masked(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested ``values`` with secrets of the environment where a file of a run has none.

    Raises:
        ConfigError: Some are missing. The message names the variable of each.
    """
    missing = list[str]()
    for path in find_masked(values):
        variable = variable_of(path)
        if variable in os.environ:
            text, masked = os.environ[variable], _get_value(values, path)
            _set_value(values, path, text if isinstance(masked, str) else _load_yaml(text))
        else:
            missing.append(
                f"{path} is a secret, which the files of a run do not hold: set it in the environment variable "
                f"{variable}, or give it with --{path}"
            )
    if missing:
        raise ConfigError("\n".join(missing))
    return values


def read_values(
    cls: type, path: str | Path | None = None, overrides: Sequence[str] = (), content: bytes | None = None
) -> dict[str, Any]:
    """Return the nested values that :func:`load_config` checks. Only their syntax has been checked."""
    return with_overrides(cls, _read_yaml(Path(path), content) if path is not None else {}, overrides)


def with_overrides(cls: type, values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``values``, nested values of ``cls``, in which each of ``overrides`` has replaced its own key alone."""
    for dotted, value in parse_overrides(cls, overrides):
        _set_value(values, dotted, value)
    return values


def build_config(
    cls: type[C], values: Mapping[str, Any], *, key: str = "", source: str = "", typed: Sequence[str] = ()
) -> C:
    """Build a section from ``values``, which are nested as the sections are.

    Args:
        cls: The section.
        values: Values by name of the key.
        key: Path of the key that holds ``values``, as in "algorithm.options". Errors put it before the names of keys.
            With a key, text is not read as a number, because the configuration keeps these values as they were given.
        source: File that the values were read from. Errors name it, except for keys in ``typed``.
        typed: Dotted paths of the values that were given on the command line.

    Raises:
        ConfigError: Every mistake found, one a line.
    """
    mask(values, key)  # the secrets that errors and logs leave out from now on
    try:
        return _validate(cls, values, text_as_number=not key)
    except pydantic.ValidationError as error:
        lines = _mistakes(cls, error, key).items()
        ours = {line for line, path in lines if not source or any(_is_about(name, line, path) for name in typed)}
        raise ConfigError("\n".join(line if line in ours else f"{source}: {line}" for line, _ in lines)) from None


def _is_about(typed: str, line: str, path: str) -> bool:
    """Whether a mistake at ``path`` is one of the key ``typed``. That of several keys has the path of their section, or
    none, and its line names them."""
    if path and not typed.startswith(f"{path}."):
        return f"{path}.".startswith(f"{typed}.")
    names = "|".join(map(re.escape, (typed, typed.removeprefix(f"{path}."))))
    return re.search(rf"(?<![\w.])({names})(?!\w)", line) is not None


def find_mistyped(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the nested ``values`` that its key of ``cls`` does not take. Keys that ``cls`` lacks,
    and values that contradict each other, have none."""
    try:
        _validate(cls, values)
    except pydantic.ValidationError as error:
        return [*_mistakes(cls, error, "", without=_UNTYPED)]
    return []


def parse_overrides(cls: type, arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """Parse ``["--optim.lr", "1e-4", "--run.name=x"]`` into pairs of a dotted path and a value.

    A value is read as YAML, except where the key takes text: there ``007`` stays ``007``. ``null`` means None.

    Raises:
        ConfigError: Arguments are no ``--key``, or keys have no value. The message has a line for each.
    """
    pairs, mistakes = _read_overrides(cls, arguments)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return pairs


def _find_replaced(pairs: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield a line for each override of a mapping that would drop the entry of an earlier override."""
    for number, (path, value) in enumerate(pairs):
        for earlier, entry in pairs[:number]:
            if not earlier.startswith(f"{path}."):
                continue
            names = earlier.removeprefix(f"{path}.").split(".")
            kept = functools.reduce(
                lambda inner, name: inner.get(name) if isinstance(inner, dict) else None, names, value
            )
            if kept != entry:
                yield f"--{path} comes behind --{earlier} and would replace it: write --{path} first"


def find_override(cls: type, arguments: Sequence[str], key: str) -> Any:
    """Return the last value that ``arguments`` give ``key``, or None. :func:`load_config` names mistakes in them."""
    return dict(_read_overrides(cls, arguments)[0]).get(key)


def _read_overrides(cls: type, arguments: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """The pairs of :func:`parse_overrides`, and a line for each argument that is none."""
    pairs: list[tuple[str, Any]] = []
    mistakes: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            mistakes.append(f"{argument!r} is no setting: {describe_word(argument, list(_paths(cls, '')))}")
            continue
        dotted, equals, text = argument[2:].partition("=")
        dotted = dotted.replace("-", "_")
        if not equals:
            if not rest or re.match(r"--[A-Za-z]|[+~]*[A-Za-z_.]+=", rest[0]):
                mistakes.append(f"--{dotted} has no value: write --{dotted} VALUE")
                continue
            text = rest.pop(0)
        try:
            pairs.append((dotted, _parse_value(locate_key(cls, dotted.split("."))[1], text, dotted)))
        except ConfigError as error:
            mistakes.append(str(error))
    return pairs, [*mistakes, *_find_replaced(pairs)]


def keys_of(cls: type, path: str = "") -> list[Key]:
    """Return every key of a section and of the sections in it, in order, with the defaults that hold there."""
    return list(_keys(cls, path, _validate(cls, {}), ""))


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return a section as nested plain values, which YAML can hold."""
    return cast("dict[str, Any]", _plain(config))


def _plain(value: Any) -> Any:
    """As ``to_jsonable_python``, with infinities and keys that are numbers, which options may hold and JSON cannot."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        inner = cast("Mapping[Any, Any]", value)
        return {key if isinstance(key, int | float | None) else str(key): _plain(entry) for key, entry in inner.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, cast("Sequence[Any]", value))]
    return to_jsonable_python(value, fallback=str, inf_nan_mode="constants")


def config_to_yaml(config: Any) -> str:
    """Return a section as YAML that :func:`load_config` reads back to an equal one. Secrets are masked; a key that was
    masked needs its value again."""
    values = mask(config_to_dict(config))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None)


# -- reading ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads ``1e-4`` as a number and ``1:30`` and ``2024-01-31`` as text, as YAML 1.2 does, and refuses a key that
    occurs twice, and ``010``, which is 8 or 10. PyYAML does none of these.

    PyYAML's loader in C takes an eighth of the time, and ends the process where a stranger's file is nested deeply.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # no other key is one of a section
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} appears twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_plain(self, node: yaml.ScalarNode) -> object:
        """Return a number as PyYAML reads it, and the text of a time, which PyYAML checks, and of ``1:30``."""
        kind = node.tag.rpartition(":")[2]
        value = getattr(super(), f"construct_yaml_{kind}")(node)
        if kind == "int" and re.fullmatch(r"[-+]?0[0-7_]+", node.value) and value != int(node.value.replace("_", "")):
            problem = "a number that begins with 0 is octal, so that 010 is 8: leave out the 0, or quote a text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node.value if kind == "timestamp" or ":" in node.value else value


for _kind in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_plain)


class _Dumper(yaml.SafeDumper):
    """Quotes text that :class:`_Loader` would read as a number."""


for _reads_or_writes in (_Loader, _Dumper):
    _reads_or_writes.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def _read_yaml(path: Path, content: bytes | None = None) -> dict[str, Any]:
    try:
        loaded = _load_yaml((path.read_bytes() if content is None else content).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except ValueError as error:
        where = str(error).replace(' in "<unicode string>",', " in")
        raise ConfigError(f"{path} is not valid YAML, such as `optim: {{lr: 1e-4}}`: {where}") from None
    if not isinstance(loaded, dict | None):
        meant = "a configuration is a mapping of sections in YAML, such as `optim: {lr: 1e-4}`"
        raise ConfigError(f"{path} holds {type(loaded).__name__}, and {meant}")
    return cast("dict[str, Any]", loaded or {})


def _load_yaml(text: str) -> object:
    """Read YAML of plain values. Raises ValueError for any other text."""
    try:
        loaded: object = yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError(TOO_MUCH) from None
    except Exception as error:  # noqa: BLE001 - PyYAML lets pass what dates, numbers and keys raise
        raise ValueError(read_text(remove_quotes(error, text))) from None
    check_plain(loaded)
    return loaded


def _parse_value(field: FieldInfo, text: str, dotted: str) -> Any:
    arms = arms_of(field.annotation)
    plain = str in arms and not (type(None) in arms and text in ("null", "none", "None", "~"))
    try:
        if plain:
            check_plain(text)
            return _read_collection(arms, text)
        value = _load_yaml(text)
    except ValueError as error:
        argument = shlex.join(mask_command([f"--{dotted}", text[:200]]))
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in argument)
        raise ConfigError(f"{shown} is not valid YAML: {error}") from None
    return None if value in ("none", "None") and type(None) in arms else value


def _read_collection(arms: Sequence[Any], text: str) -> Any:
    """``text``, or the list or mapping that it writes in YAML if the key takes that beside text."""
    taken = {"[": tuple, "{": Mapping}.get(text[:1])
    if taken is None or not any(issubclass(typing.get_origin(arm) or str, taken) for arm in arms):
        return text
    try:
        return _load_yaml(text)
    except ValueError:  # a pattern of file names, such as [ab]*.jsonl
        return text


def _get_value(values: Mapping[str, Any], dotted: str) -> object:
    return functools.reduce(lambda inner, name: cast("Any", inner)[name], dotted.split("."), cast("Any", values))


def _set_value(values: dict[str, Any], dotted: str, value: object) -> None:
    *sections, last = dotted.split(".")
    for depth, name in enumerate(sections):
        inner = values.get(name)
        if inner is None:
            inner = values[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--{dotted}: {'.'.join(sections[: depth + 1])} is {mask(inner, name)!r}, which has no keys below it"
            )
        values = cast("dict[str, Any]", inner)
    values[last] = value


# -- checking --------------------------------------------------------------------------------------------------------


def _validate(cls: type[C], values: Mapping[str, Any], text_as_number: bool = True) -> C:
    merged = _keep_preferred(cls, values)
    return cast(Any, cls).__pydantic_validator__.validate_python(merged, context=text_as_number)


def _remember_keys(made: object, names: tuple[str, ...]) -> None:
    number = id(made)
    _named_keys[number] = weakref.ref(made, lambda _, forget=_named_keys.pop: forget(number, None)), names


def _reduce_section(made: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Say how a section is copied and pickled: with the keys that were named."""
    _, names = _named_keys.get(id(made), (None, None))
    return _restore_section, (type(made), {**vars(made)}, names)


def _restore_section(cls: type, values: Mapping[str, object], names: tuple[str, ...] | None) -> object:
    made = object.__new__(cls)
    vars(made).update(values)
    if names is not None:
        _remember_keys(made, names)
    return made


def _keep_preferred(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with those of :func:`prefer` in sections, for keys that are not set there. Of a section that a
    script has made, the keys that it named are set."""
    merged = dict(values)
    for name, field in fields_of(cls).items():
        inner = values.get(name)
        if not isinstance(field.default_factory, functools.partial):
            continue
        preferred, (_, named) = field.default_factory.keywords, _named_keys.get(id(inner), (None, None))
        if isinstance(inner, Mapping):
            merged[name] = {**preferred, **inner}
        elif named is not None and preferred.keys() - named:
            merged[name] = type(inner)(**{**preferred, **{key: getattr(inner, key) for key in named}})
    return merged


def _refuse_conversions(cls: type, value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false where a key takes no such value. Pydantic would take them for 1 and 0.

    Of options, text is refused as well where a key takes a number or a truth value.
    """
    arms = arms_of(fields_of(cls)[str(info.field_name)].annotation)
    taken = {inner for arm in arms for inner in (arm, *typing.get_args(arm))}
    entries = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(entry, bool) for entry in entries) and not taken & {bool, Any}:
        raise PydanticCustomError("bool", "a truth value")
    text = any(isinstance(entry, str) and entry not in taken for entry in entries)
    if info.context is False and text and taken & {int, float, bool} and not taken & {str, Any}:
        raise PydanticCustomError("text", "text")
    return value


_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_UNTYPED = (*_UNKNOWN, "missing", "value_error")  # mistakes that are not in the type or the range of a value


def _mistakes(cls: type, error: pydantic.ValidationError, prefix: str, without: Sequence[str] = ()) -> dict[str, str]:
    """A line for each mistake that is none of the kinds ``without``. It says what is wrong, with the path of the
    key."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        if problem["type"] in without:
            continue
        names, field = locate_key(cls, problem["loc"])
        path, value = ".".join([prefix, *names]).strip("."), problem["input"]
        raised = problem.get("ctx", {}).get("error")
        if problem["type"] == "value_error" and raised is not None:  # a section's __post_init__
            line = str(raised) if not path or str(raised).startswith(path) else f"{path}: {raised}"
        elif problem["type"] in _UNKNOWN:
            lines |= dict(_unknown(cls, prefix, names, problem["loc"][-1], value))
            continue
        elif problem["type"] == "missing" and len(names) == len(problem["loc"]):
            line = f"{path} is missing: expected {describe_expected(field)}"
        else:
            finite = "a finite number" if problem["type"] == "finite_number" else "a number"
            line = f"{path} = {mask(value, path)!r}: expected {describe_expected(field).replace('a number', finite)}"
            line += _hint_value(path, value, field)
        lines[line] = path
    return lines


def _hint_value(path: str, value: object, field: FieldInfo) -> str:
    """The end of a message about a wrong value: what another project's is here, or the choice that was mistyped."""
    if translation := load_answers().find_translation(path, value):
        meant = "; there is none:" if translation.missing else suggest(show_value(translation.value))
        return f"{meant} {translation.remark}".rstrip()
    arms = arms_of(field.annotation)
    if isinstance(value, str) and any(
        typing.get_origin(arm) is tuple and str in arms_of(typing.get_args(arm)[0]) for arm in arms
    ):
        return suggest(f"[{value}]")
    literals = [arm for arm in arms if typing.get_origin(arm) is typing.Literal]
    near = nearest_spellings(str(value), [str(choice) for arm in literals for choice in typing.get_args(arm)])
    return suggest(*near[:1])


def _unknown(root: type, prefix: str, names: Sequence[str], key: object, value: object) -> Iterator[tuple[str, str]]:
    """The lines for an unknown key, each with its path. A section of another project has one for each setting in it."""
    path = ".".join([prefix, *names, str(key)]).strip(".")
    inside = list(_leaves(value, path)) if isinstance(value, Mapping) else []
    keys, describe = None if prefix else {*_paths(root, "")}, load_answers().describe_setting
    foreign = any(describe(leaf, setting, keys) for leaf, setting in inside)
    for leaf, setting in inside if foreign else [(path, value)]:
        shown = f" (value {mask(setting, leaf)!r})" if isinstance(key, str) else ""
        if leaf == path and "." in str(key) and path in _paths(root, prefix):
            hint = (
                ": write it within its section, as " + ": {".join(path.split(".")) + ": VALUE" + "}" * path.count(".")
            )
        else:
            hint = describe(leaf, setting, keys) or _suggest(root, prefix, names, str(key), value)
        yield f"unknown key {leaf}{shown}{hint}", leaf


def _leaves(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        inner = f"{path}.{name}"
        yield from _leaves(cast("Mapping[Any, Any]", value), inner) if isinstance(value, Mapping) else [(inner, value)]


def _suggest(root: type, prefix: str, names: Sequence[str], name: str, value: object) -> str:
    """The key that was mistyped, or what there is. A typing error is one or two letters beside a key of the section."""
    inside = ".".join([prefix, *names]).strip(".")
    section = section_of(locate_key(root, names)[1].annotation)
    siblings = list(fields_of(section))
    if near := [sibling for sibling in nearest_spellings(name, siblings) if _takes(section, sibling, value)]:
        return suggest(f"{inside}.{near[0]}".strip("."))
    same = [path for path in _paths(root, prefix) if path.endswith(f".{name}")]
    others = same or _find_by_help(root, prefix, name, value)
    what = "keys of this name" if same else "keys whose help has this word"
    hint = f": {what} are {', '.join(others)};" if others else ":"
    return f"{hint} {inside or 'the configuration'} has {', '.join(siblings)}{'' if prefix else explain_no_answers()}"


def _find_by_help(root: type, prefix: str, name: str, value: object) -> list[str]:
    """At most three keys that take ``value`` and of whose help the first sentence has the words of ``name``."""
    words, lengths = words_of(name.replace("_", " ")), dict[str, int]()
    for path in _paths(root, prefix) if words else ():
        names, field = locate_key(root, path.removeprefix(f"{prefix}.").split("."))
        sentence = (field.description or "").partition(". ")[0]
        section = root if len(names) == 1 else section_of(locate_key(root, names[:-1])[1].annotation)
        if section and words <= words_of(sentence) and _takes(section, names[-1], value):
            lengths[path] = len(sentence)
    return sorted(lengths, key=lengths.__getitem__)[:3]


def _takes(section: type, name: str, value: object) -> bool:
    """Whether a key of a section takes a value of this type."""
    try:
        _validate(section, {name: value})
    except pydantic.ValidationError as error:
        types = [problem["type"] for problem in error.errors(include_url=False) if problem["loc"][:1] == (name,)]
        return all(kind in _OF_RIGHT_TYPE for kind in types)
    return True


_OF_RIGHT_TYPE = {
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "finite_number",
    "literal_error",
}


def _paths(cls: type, prefix: str) -> Iterator[str]:
    for name, field in fields_of(cls).items():
        inner, path = section_of(field.annotation), f"{prefix}.{name}".strip(".")
        yield from _paths(inner, path) if inner else (path,)


def _keys(cls: type, prefix: str, defaults: object, note: str) -> Iterator[Key]:
    title = " ".join((cls.__doc__ or "").partition("\n\n")[0].split()) + note
    for name, field in fields_of(cls).items():
        path, default = f"{prefix}.{name}".strip("."), getattr(defaults, name)
        if (inner := section_of(field.annotation)) and default is None:
            yield from _keys(inner, path, _validate(inner, {}), f" {path} is off until one of its keys is given.")
        elif inner:
            yield from _keys(inner, path, default, "")
        else:
            yield Key(path, describe_expected(field), default, " ".join((field.description or "").split()), title)
