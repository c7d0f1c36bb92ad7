"""Answers to settings of other projects, in the words of an error."""

import shlex
from collections.abc import Collection

import yaml

from podium.answers import Answers, Translation, show_value
from podium.spelling import suggest
from podium_migration.tables import Equivalent, find_equivalent, find_translation, read_tables

__all__ = ["ProjectAnswers"]


class ProjectAnswers(Answers):
    """The answers of the tables beside this module."""

    def find_translation(self, key: str, value: object) -> Translation | None:
        """As of the class above."""
        return find_translation(key, value)

    def describe_setting(self, path: str, value: object, keys: Collection[str] | None) -> str:
        """As of the class above."""
        answer = _find_answer(path, keys)
        return _describe(answer, value) if answer else ""

    def describe_word(self, argument: str, keys: Collection[str]) -> str:
        """As of the class above."""
        name, equals, value = argument.lstrip("+~").partition("=")
        removes = argument.startswith("~")
        answer = _find_answer(name, keys) if equals or removes else None
        if answer is None:
            return ""
        if removes:
            remark = f": Podium has none and needs none: {answer.remark}" if answer.holds else _describe(answer, None)
            return f"leave it out{remark}"
        read = _read_value(value)
        translation = answer.translate(read) if answer.key else None
        if not answer.key or (translation is not None and translation.missing):
            return _describe(answer, value).removeprefix(": ")
        if translation is not None:
            typed = f"--{translation.key or answer.key} {show_value(translation.value)}"
        else:
            typed = f"--{answer.key} {'VALUE' if answer.rule else shlex.quote(value)}"
        remark = _join(translation.remark if translation else "", answer.remark)
        return f"write {typed}" + (f": {remark}" if remark else "")


def _find_answer(path: str, keys: Collection[str] | None) -> Equivalent | None:
    """Return what another project's setting ``path`` is in a configuration with these ``keys``.

    Below a section of Podium's, another project's name without dots counts only for a key of the same section. None as
    ``keys`` stands for a section that is built by itself in Python, where it counts for any.
    """
    if ".options." in f".{path}":
        return None
    answer = find_equivalent(path, keys)
    section, _, name = path.rpartition(".")
    if answer and not section and keys:
        return _prefer_own_keys(path, answer, keys)
    if answer or not section:
        return answer
    if keys is None:
        return find_equivalent(name)
    answer = find_equivalent(name, keys) if any(key.startswith(f"{section}.") for key in keys) else None
    return answer if answer and answer.key.startswith(f"{section}.") else None


def _prefer_own_keys(word: str, answer: Equivalent, keys: Collection[str]) -> Equivalent:
    """Return an answer that lists Podium's keys of the name ``word`` first, if ``answer`` has another key and is that
    to a setting whose name only ends so."""
    same_names, tables = [key for key in keys if key.endswith(f".{word}")], read_tables()
    if not same_names or not answer.key or answer.key in same_names:
        return answer
    if any(word in table.answers or table.find(word) for table in tables):
        return answer
    ends = {f"{table.project}'s {name}": end for table in tables for name, end in table.find_endings(word).items()}
    name = next(name for name, end in ends.items() if end.choose(keys) == answer)
    return Equivalent(remark=f"keys of this name are {', '.join(same_names)}; {name} is {answer.key}", several=True)


def _describe(answer: Equivalent, value: object) -> str:
    """Return the end of a message about a setting of another project that has ``value``."""
    if answer.several:
        return f": {answer.remark}"
    if not answer.key:
        return f": Podium has none{'' if answer.lacks(value) else ' and needs none'}: {answer.remark}"
    translation = answer.translate(value) or Translation()
    key, remark = translation.key or answer.key, _join(translation.remark, answer.remark)
    if translation.missing:
        return f": {key} has no such value: {remark}"
    differs = translation.value is not None and (translation.value != value or translation.key)
    setting = f"{key}: {show_value(translation.value)}" if differs else key
    return f"{suggest(setting)} {remark}".rstrip()


def _read_value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _join(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))
