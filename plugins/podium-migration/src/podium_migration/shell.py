"""A reader of shell scripts that start a training. It runs nothing, and follows variables, arrays and continued lines.

Lines inside ``if``, ``case``, loops and functions are not followed, because they depend on the machine. What they
decide is :data:`UNDECIDED`, as is what another program would print.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["UNDECIDED", "Script", "read_script"]

UNDECIDED: Final = "\0"
"""It stands in the text of a word for what the script alone does not say."""

_OPENING: Final = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done"}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_PARAMETER: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[@*#?0-9])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """What a script says.

    Attributes:
        commands: The words of each command that is not in a condition, without assignments.
        variables: Values of variables, and of arrays as lists of words.
        conditional: Names of variables that are set in conditions.
    """

    commands: list[list[str]] = field(default_factory=list[list[str]])
    variables: dict[str, str | list[str]] = field(default_factory=dict[str, "str | list[str]"])
    conditional: set[str] = field(default_factory=set[str])

    def expand(self, text: str) -> list[str]:
        """Return the words that a word of the script becomes."""
        return _Expansion(self).expand(text)


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    """Read the text of a script as a shell in this environment would, as far as that needs no other program."""
    script = Script(variables=dict(environment))
    closing: list[str] = []
    for words in _split_commands(text.replace("\\\n", " ")):
        first = words[0]
        if first in _OPENING:
            closing.append(_OPENING[first])
        elif re.fullmatch(r"\w+\(\)", first) or first == "function":
            closing.append("}")
        if closing:
            if words[-1] == closing[-1] or first == closing[-1]:
                closing.pop()
            script.conditional |= {match[1] for word in words if (match := _ASSIGNMENT.match(word))}
            continue
        _run_command(script, words)
    return script


def _run_command(script: Script, words: list[str]) -> None:
    rest = words[1:] if words[0] in ("export", "local", "declare", "readonly") else list(words)
    while rest and (match := _ASSIGNMENT.match(rest[0])):
        word = rest.pop(0)[match.end() :]
        before = script.variables.get(match[1], "") if match[2] else ""
        if word.startswith("("):
            items = [item for inner in _split_words(word[1:-1]) for item in script.expand(inner)]
            script.variables[match[1]] = [*(before if isinstance(before, list) else []), *items]
        else:
            script.variables[match[1]] = f"{before}{' '.join(script.expand(word))}"
    if rest and rest is not words and words[0] != "export":
        script.commands.append([item for word in rest for item in script.expand(word)])


# -- words -----------------------------------------------------------------------------------------------------------


def _split_commands(text: str) -> list[list[str]]:
    """The commands of a script, as lists of words that are not expanded. Comments are left out."""
    commands: list[list[str]] = [[]]
    for word in _split_words(text, separators=True):
        if word in _SEPARATORS:
            commands.append([])
        elif word not in ("then", "do", "else", "{") or commands[-1]:
            commands[-1].append(word)
    return [words for words in commands if words]


_SEPARATORS: Final = ("\n", ";", "&&", "||", "|", "&", ";;")


def _split_words(text: str, separators: bool = False) -> list[str]:
    words: list[str] = []
    index, start = 0, None
    while index < len(text):
        letter = text[index]
        if letter == "#" and start is None:
            index = text.find("\n", index) if "\n" in text[index:] else len(text)
            continue
        if letter in " \t\n;|&" and not (letter == "&" and text[index - 1] == ">"):
            if start is not None:
                words.append(text[start:index])
                start = None
            double = text[index : index + 2] if text[index : index + 2] in _SEPARATORS else letter
            if separators and double.strip(" \t"):
                words.append(double)
            elif separators and letter == "\n":
                words.append(letter)
            index += len(double)
            continue
        start = index if start is None else start
        index = _skip_part(text, index)
    return [*words, text[start:]] if start is not None else words


def _skip_part(text: str, index: int) -> int:
    """The index behind the part of a word that begins at ``index``: a letter, or what quotes or brackets enclose."""
    letter = text[index]
    if letter == "\\":
        return index + 2
    if letter == "'":
        return _behind(text, "'", index + 1)
    if letter == '"':
        index += 1
        while index < len(text) and text[index] != '"':
            index = _skip_part(text, index) if text[index] in "\\$`" else index + 1
        return index + 1
    if letter == "`":
        return _behind(text, "`", index + 1)
    opening = text[index : index + 2]
    if opening not in ("$(", "${", "=("):
        return index + 1
    start, end = opening[1], {"(": ")", "{": "}"}[opening[1]]
    index, depth = index + 2, 1
    while index < len(text) and depth:
        depth += (text[index] == start) - (text[index] == end)
        if text[index] == "#" and start == "(" and text[index - 1] in " \n\t":
            index = _behind(text, "\n", index)
        elif text[index] in "\\'\"`" or (text[index] == "$" and start == "{"):
            index = _skip_part(text, index)
        else:
            index += 1
    return index


def _behind(text: str, end: str, start: int) -> int:
    index = text.find(end, start)
    return len(text) if index < 0 else index + 1


class _Expansion:
    """The expansion of one word. ``items`` are the words that it has become; the last one grows."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.items = [""]

    def expand(self, text: str) -> list[str]:
        self._add(text)
        return [item for item in self.items if item or text.startswith(("'", '"'))]

    def _add(self, text: str, quoted: bool = False) -> None:
        index = 0
        while index < len(text):
            end = index + 1 if quoted and text[index] in "'\"" else _skip_part(text, index)
            part = text[index:end]
            if part.startswith("'") and not quoted:
                self.items[-1] += part[1:-1]
            elif part.startswith('"') and not quoted:
                self._add(part[1:-1], quoted=True)
            elif part.startswith("\\"):
                self.items[-1] += part[1:]
            elif part.startswith("$(("):
                self.items[-1] += self._calculate(part[3:-2])
            elif part.startswith(("$(", "`")):
                self.items[-1] += UNDECIDED
            elif part.startswith("${"):
                self._add_parameter(part[2:-1])
            elif part == "$" and (match := re.match(r"[A-Za-z_]\w*|[@*#?0-9]", text[end:])):
                end += match.end()
                self._add_parameter(match[0])
            else:
                self.items[-1] += part
            index = end

    def _add_parameter(self, text: str) -> None:
        match = _PARAMETER.fullmatch(text)
        if match is None:  # ${name%pattern}, ${#name} and others
            self.items[-1] += UNDECIDED
            return
        name, all_items, operation, other = match.groups()
        value = self.script.variables.get(name)
        if value is None and name in self.script.conditional:
            self.items[-1] += UNDECIDED
        elif isinstance(value, list):
            words = value if all_items else value[:1]
            self.items[-1] += words[0] if words else ""
            self.items += words[1:]
        elif operation and "+" in operation:
            self._add(other if value else "")
        elif operation and (value is None or (value == "" and ":" in operation)):
            if "=" in operation:
                self.script.variables[name] = " ".join(self.script.expand(other))
            self._add(other)
        elif value == "" and name in self.script.conditional:
            self.items[-1] += UNDECIDED
        else:
            self.items[-1] += value or ""

    def _calculate(self, text: str) -> str:
        names = _NAME.sub(
            lambda match: str(self.script.variables.get(match[0], "")), text.replace("${", "").replace("}", "")
        )
        names = names.replace("$", "")
        try:
            return str(_evaluate(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return UNDECIDED


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("no arithmetic of integers")
