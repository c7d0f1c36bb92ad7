"""Answers to settings of other projects, in the words of an error."""

import shlex
from collections.abc import Collection
from typing import Final

import yaml

from podium.migration import Equivalent, Translation, find_equivalent
from podium.spelling import nearest_spellings

__all__ = ["describe_answer", "find_answer", "show_override", "show_value"]

_FORM: Final = "write --section.key value, as in --optim.lr 1e-4"


def find_answer(path: str, keys: Collection[str] | None) -> Equivalent | None:
    """Return what another project's setting ``path`` is in a configuration with these ``keys``.

    Below a section of Podium's, another project's name without dots counts only for a key of the same section. None as
    ``keys`` stands for a section that is built by itself in Python, where it counts for any.
    """
    if ".options." in f".{path}":
        return None
    answer = find_equivalent(path, keys)
    section, _, name = path.rpartition(".")
    if answer or not section:
        return answer
    if keys is None:
        return find_equivalent(name)
    answer = find_equivalent(name, keys) if any(key.startswith(f"{section}.") for key in keys) else None
    return answer if answer and answer.key.startswith(f"{section}.") else None


def describe_answer(answer: Equivalent, value: object) -> str:
    """Return the end of a message about a setting of another project that has ``value``."""
    if answer.several:
        return f": {answer.remark}"
    if not answer.key:
        return f": {'Podium has none' if answer.missing else 'there is none, and it needs none'}: {answer.remark}"
    translation = answer.translate(value) or Translation()
    key, remark = translation.key or answer.key, _join(translation.remark, answer.remark)
    if translation.missing:
        return f": {key} has no such value: {remark}"
    differs = translation.value is not None and (translation.value != value or translation.key)
    return f": did you mean {key}{f': {show_value(translation.value)}' if differs else ''}? {remark}".rstrip()


def show_override(argument: str, keys: Collection[str]) -> str:
    """Return how a word of the command line is typed here. Hydra's are name=value, +name=value and ~name, without
    dashes."""
    name, equals, value = argument.lstrip("+~").partition("=")
    removes = argument.startswith("~")
    if name in keys:
        return "leave it out" if removes else f"write --{name} {shlex.quote(value) if equals else 'VALUE'}"
    answer = find_answer(name, keys) if equals or removes else None
    if answer is None:
        section, _, last = name.rpartition(".")
        near = nearest_spellings(last, (key.removeprefix(f"{section}.") for key in keys))
        return f"write --{section}.{near[0]} {shlex.quote(value)}" if section and near else _FORM
    if removes:
        return f"leave it out{describe_answer(answer, None)}"
    read = _read_value(value)
    translation = answer.translate(read) if answer.key else None
    if not answer.key or (translation is not None and translation.missing):
        return describe_answer(answer, value).removeprefix(": ")
    if translation is not None:
        typed = f"--{translation.key or answer.key} {show_value(translation.value)}"
    else:
        typed = f"--{answer.key} {'VALUE' if answer.rule else shlex.quote(value)}"
    remark = _join(translation.remark if translation else "", answer.remark)
    return f"write {typed}" + (f": {remark}" if remark else "")


def show_value(value: object) -> str:
    """Return a value as it is typed on the command line."""
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
    return shlex.quote(text.removesuffix("\n").removesuffix("...").strip())


def _read_value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _join(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))
