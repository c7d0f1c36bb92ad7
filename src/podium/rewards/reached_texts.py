"""The names in the code that a reward reaches, of which some may be those of environment variables that it reads.

reward ─▶ functions, classes and modules of its user that it names ─▶ their constant texts

Code of Python and of installed packages is left out, but for the package of the reward itself. Nothing is run or
imported for the search.
"""

import ast
import dis
import functools
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, cast

from podium.rewards.signatures import find_function, list_texts

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,127}")
_MOST_OBJECTS: Final = 4096
_MOST_NAMES: Final = 4096
_MOST_ENTRIES: Final = 256  # of a list or a mapping
_MOST_BYTES: Final = 1 << 20  # of a source file
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def list_reached_names(reward: Callable[..., Any]) -> list[str]:
    """Return the constant texts that the code of a reward has and reaches, and that may be names of variables."""
    search = _Search(reward)
    search.run()
    return sorted(filter(_NAME.fullmatch, search.texts))[:_MOST_NAMES]


class _Search:
    """The search from object to object.

    Attributes:
        texts: The texts so far.
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.texts: set[str] = set()
        self._seen: dict[int, Any] = {}  # with the objects, so that no other gets the number of one of them
        self._sources: set[str] = set()
        self._left: list[Any] = [reward]
        self._reward = reward
        function = find_function(reward)
        self._package = str(getattr(function, "__module__", None)).partition(".")[0]

    def run(self) -> None:
        """Go from object to object until none is left."""
        while self._left and len(self._seen) < _MOST_OBJECTS:
            value = self._left.pop()
            if issubclass(type(value), str):  # isinstance asks the object for its class
                self.texts.add(value)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                with suppress(Exception):  # an object of the user may raise anything
                    self._visit(value)

    def _visit(self, value: Any) -> None:
        match value:
            case functools.partial():
                self._left += [value.func, *value.args, *value.keywords.values()]
            case FunctionType():
                self._visit_function(value)
            case MethodType():
                self._left += [value.__func__, value.__self__]
            case staticmethod() | classmethod():
                self._left.append(value.__func__)
            case property():
                self._left += [value.fget]
            case type():
                if self._is_users(value.__module__):
                    self._read_module(value.__module__)
                    self._left += [*vars(value).values(), *value.__bases__]
            case dict() | list() | tuple() | set() | frozenset():
                self._left += [*_list_entries(value)]
            case _:
                self._visit_instance(value)

    def _visit_instance(self, value: Any) -> None:
        attributes = cast("dict[str, Any]", getattr(value, "__dict__", {}))
        if value is self._reward or self._is_users(type(value).__module__):
            self._left += [type(value), *attributes.values()]
        elif "__wrapped__" in attributes:  # what functools.cache makes, for one
            self._left.append(attributes["__wrapped__"])

    def _visit_function(self, function: FunctionType) -> None:
        """Take the texts of a function, and go on to what it names. Of a wrapper of a library, to what it wraps."""
        self._left += [vars(function).get("__wrapped__"), *_list_cells(function)]
        is_reward = function is self._reward
        if not (is_reward or self._is_users(function.__module__) or _is_users_file(function.__code__.co_filename)):
            return
        self._read_module(function.__module__)
        self.texts.update(list_texts(function.__code__))
        self._left += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names = {name for code in _list_codes(function.__code__) for name in code.co_names}
        self._add_named(function.__globals__, names)
        for code in _list_codes(function.__code__):
            for instruction in dis.get_instructions(code):
                if instruction.opname == "IMPORT_NAME":
                    self._add_import(str(instruction.argval), names)

    def _add_named(self, space: Mapping[str, Any], names: Collection[str]) -> None:
        """Go on to what names of a function stand for, also as attributes of a module of the user."""
        modules, seen = [space], set[int]()
        while modules:
            values = [modules[-1][name] for name in names if name in modules[-1]]
            modules.pop()
            for value in values:
                if not isinstance(value, ModuleType):
                    self._left.append(value)
                elif id(value) not in seen and self._is_users(value.__name__):
                    seen.add(id(value))
                    self._read_module(value.__name__)
                    modules.append(vars(value))

    def _add_import(self, name: str, names: Collection[str]) -> None:
        """Go on to a module that a function imports once it is called."""
        if name in sys.modules:
            self._add_named({name: sys.modules[name]}, {name, *names})
        elif "." not in name and (spec := PathFinder.find_spec(name)) is not None and _is_users_file(spec.origin):
            self._read_source(str(spec.origin), inner=True)

    def _is_users(self, module: str | None) -> bool:
        """Whether a module is the user's, or of the package of the reward."""
        if not module or module.partition(".")[0] == "podium":
            return False
        loaded = sys.modules.get(module)
        in_package = module.partition(".")[0] == self._package and self._package not in sys.stdlib_module_names
        return in_package or _is_users_file(getattr(loaded, "__file__", None))

    def _read_module(self, name: str) -> None:
        """Take the texts of the statements that importing a module runs."""
        file = getattr(sys.modules.get(name), "__file__", None)
        is_podiums = file is not None and file.startswith(_list_installed()[0])  # as __main__ of a grading process is
        if file is not None and self._is_users(name) and not is_podiums:
            self._read_source(file, inner=False)

    def _read_source(self, file: str, *, inner: bool) -> None:
        path = Path(file)
        if file in self._sources or path.suffix != ".py" or path.stat().st_size > _MOST_BYTES:
            return
        self._sources.add(file)
        with suppress(OSError, SyntaxError, ValueError):
            self.texts.update(_list_constants(ast.parse(path.read_bytes()), inner=inner))


def _list_constants(tree: ast.AST, *, inner: bool) -> Iterator[str]:
    """Yield the texts of a module, those in the bodies of functions only with ``inner``."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if inner or not isinstance(node, _FUNCTIONS):
            nodes += ast.iter_child_nodes(node)


def _list_entries(value: Any) -> Iterator[Any]:
    """Yield the texts and functions in a list or a mapping that is not large."""
    entries = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [*value]
    yield from (entry for entry in entries[:_MOST_ENTRIES] if isinstance(entry, str) or callable(entry))


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_codes(constant)


def _list_cells(function: FunctionType) -> Iterator[Any]:
    """Yield what a function has of those around it."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _is_users_file(file: str | None) -> bool:
    """Whether a file is neither Python's nor Podium's, nor of an installed package."""
    return bool(file) and not str(file).startswith(("<frozen ", *_list_installed()))


@functools.cache
def _list_installed() -> tuple[str, ...]:
    """The folders of Podium, of Python, and of installed packages."""
    folders = [str(Path(__file__).parents[1])]
    folders += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{folder}/" for folder in folders)
