"""Functions that a configuration names: rewards, advantages, losses and schedules."""

import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.metadata import EntryPoint
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, Final

from podium.answers import load_answers
from podium.errors import ConfigError, PodiumError
from podium.exceptions import read_text
from podium.extras import explain_packages, find_package
from podium.installed import list_entry_points
from podium.spelling import nearest_spellings, suggest, suggest_nearest

Known = Mapping[str, "str | Callable[..., Any]"]

OF_SCRIPT: Final = " of the script, "
"""What the description of an object that a script has passed contains, and no name of a function does."""

_NONE_KNOWN: Final[Known] = MappingProxyType({})
_loading = threading.RLock()


def check_function_name(spec: str, *, key: str, known: Known = _NONE_KNOWN, group: str = "") -> None:
    """Check the form of ``spec`` and import nothing. The arguments are those of :func:`load_function`.

    Raises:
        ConfigError: ``spec`` is neither a known name nor that of an installed package, nor of the form
            ``place:function``. The message names the nearest known name.
    """
    if OF_SCRIPT in spec:
        module, _, name = spec.partition(OF_SCRIPT)[2].rpartition(".")
        place = "path/file.py" if module == "__main__" or not name.isidentifier() or "<" in module else module
        raise ConfigError(
            f"{key} is {spec}, which the run's configuration cannot hold: run that script, or name the function, "
            f"--{key} {place}:{name if name.isidentifier() else 'function'}"
        )
    module, _, attribute = spec.rpartition(":")
    if spec in known or (module and all(part.isidentifier() for part in attribute.split("."))):
        return
    installed = {entry.name for entry in list_entry_points(group=group)} if group else set[str]()
    if spec in installed:
        return
    forms = ", ".join([*known, *sorted(installed - known.keys()), "module:function"])
    message = f"{key} = {spec!r}: expected one of {forms}, or path/file.py:function"
    translation = load_answers().find_translation(key, spec)
    if translation and translation.value != spec:  # a name of Podium's own, of a package that is not installed
        meant = ";" if translation.missing else suggest(str(translation.value))
        message = f"{message}{meant} {translation.remark}".rstrip()
    elif (near := nearest_spellings(spec, [*known, *installed])) and not (group and find_package(group, spec)):
        message += suggest(near[0])
    if spec.isidentifier():
        message += f"; your own function is path/file.py:{spec} or module:{spec}"
    raise ConfigError(f"{message}; {explain_packages(group, spec)}" if group else message)


def load_function(spec: str, *, key: str, known: Known = _NONE_KNOWN, group: str = "") -> Callable[..., Any]:
    """Return the function that ``spec`` names. A module is loaded once a process, and a file again when it has changed.

    >>> load_function("statistics:mean", key="reward.name")([1, 3])
    2

    Args:
        spec: A name in ``known``, ``package.module:function``, or ``path/file.py:function``. A relative path starts at
            the working directory. The file may import its neighbors, as a script may.
        key: The configuration's key, for errors.
        known: Names that need no module or file. A value is a function, or a string in one of the two other forms.
        group: The group of entry points through which packages bring further names; "" means none.

    Raises:
        ConfigError: The name, module, file or function does not exist; the message names the nearest one. Or the module
            raised an exception while it was loaded; the message names the statement.
    """
    check_function_name(spec, key=key, known=known, group=group)
    if group and spec not in known and (entry := find_installed(group, spec, key)) is not None:
        return load_installed(entry, key)
    target = known.get(spec, spec)
    if not isinstance(target, str):
        return target
    subject = f"{key} = {spec!r}"
    origin, _, attribute = target.rpartition(":")
    with _loading, explain_raised(subject):
        module = _load_file(Path(origin), subject) if origin.endswith(".py") else _import(origin, attribute, subject)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part) and origin == "__main__":
            raise ConfigError(
                f"{subject} is a function of the script that started the run, and the program that runs now has no "
                f"{part!r}: run that script, or name the function by its file, --{key} path/file.py:{attribute}"
            )
        if not hasattr(value, part):
            raise ConfigError(f"{subject}: {origin} has no {part!r}{_list_defined_names(module, part)}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{subject}: {attribute!r} in {origin} is not a function but of type {type(value).__name__}")
    return value


def find_installed(group: str, name: str, key: str) -> EntryPoint | None:
    """Return the entry point that installed packages have for a name; None if there is none.

    Raises:
        ConfigError: Several packages have different ones.
    """
    entries = {entry.value: entry for entry in list_entry_points(group=group, name=name)}
    if len(entries) > 1:
        packages = " and ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries.values()))
        raise ConfigError(f"{key} = {name!r} is a name in the packages {packages}: uninstall all of them but one")
    return next(iter(entries.values()), None)


def load_installed(entry: EntryPoint, key: str) -> Callable[..., Any]:
    """Return the class or function of an entry point.

    Raises:
        ConfigError: It does not exist, or its module raised an exception while it was loaded.
    """
    subject = f"{key} = {entry.name!r}: {entry.value} of the package {entry.dist.name if entry.dist else 'unknown'}"
    with _loading, explain_raised(f"{subject} cannot be loaded"):
        value = entry.load()
    if not callable(value):
        raise ConfigError(f"{subject} is no class or function but of type {type(value).__name__}")
    return value


def is_installed(entry: EntryPoint) -> bool:
    """Whether a package is where Python installs packages, and no module of the working directory hides its own.

    Elsewhere on ``sys.path``, such as in the working directory, metadata may come from somebody whom nobody trusts.
    """
    if entry.dist is None:
        return False
    paths = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    local = PathFinder.find_spec(entry.module.partition(".")[0], [os.getcwd()])
    folder = os.path.realpath(str(entry.dist.locate_file("")))
    return folder in map(os.path.realpath, paths) and (local is None or local.origin is None)


def _import(name: str, attribute: str, subject: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module exists and lacks something itself
        near = {path.stem for path in Path.cwd().glob("*.py")}.union(sys.modules) - {name, error.name}
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(
            f"{subject}: there is no module {error.name!r} on sys.path{nearest(name, sorted(near))}; name a file by "
            f"its path: {file}:{attribute}"
        ) from None


def _load_file(path: Path, subject: str) -> ModuleType:
    path = path.expanduser().absolute()
    if not path.is_file():
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"{subject}: there is no file {path}, and no directory {folder}")
        raise ConfigError(f"{subject}: there is no file {path}{nearest(str(path), map(str, folder.glob('*.py')))}")
    # The checksum keeps two files of one name apart, and a file from what it was before somebody edited it.
    name = f"podium_file_{path.stem}_{zlib.crc32(path.read_bytes(), zlib.crc32(str(path).encode())):08x}"
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(path.parent)
    module_spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    assert module_spec is not None and module_spec.loader is not None  # true for every path that ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    """Let modules beside a user's file be imported, here and in the processes that get this process's ``sys.path``.

    A folder with a module that is called like one of Python's own, such as ``logging.py``, comes after Python's: no
    process of Podium's could begin otherwise. All others come first, as a script's folder does.
    """
    if str(folder) in sys.path:
        return
    names = ((folder / f"{name}.py", folder / name / "__init__.py") for name in sys.stdlib_module_names)
    index = 0
    if any(file.exists() for files in names for file in files):
        folders = {
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
            sysconfig.get_config_var("DESTSHARED"),
        }
        index = max((sys.path.index(entry) + 1 for entry in folders if entry in sys.path), default=0)
    sys.path.insert(index, str(folder))


class _SourceLoader(SourceFileLoader):
    """Compiles the file, and reads no bytecode: what runs is what a reader of the file has seen."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextmanager
def explain_raised(subject: str, caller: str = __file__) -> Iterator[None]:
    """Turn what a user's code raises in the block into one line: the subject, the user's statement, and the exception.

    No statement of Podium's or of the file ``caller`` is the user's.

    Raises:
        ConfigError: The code raised an exception, or left by SystemExit. Podium's own errors pass through.
    """
    try:
        yield
    except PodiumError:
        raise
    except (Exception, SystemExit) as error:
        where, what = _statement(error, caller), read_text(error).strip().partition("\n")[0]
        if isinstance(error, SyntaxError) and error.filename:
            where, what = f"{error.filename}:{error.lineno}: ", error.msg
        raise ConfigError(f"{subject}: {where}{type(error).__name__}: {what}".rstrip(": ")) from error


def _statement(error: BaseException, caller: str) -> str:
    """File and line of the last statement that led to an error, of installed packages only if there is no other."""
    podium, machinery = f"{Path(__file__).parent}/", f"{Path(importlib.__file__).parent}/"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith((podium, caller, machinery, "<frozen "))]
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own_frames = [frame for frame in frames if not frame.filename.startswith(installed)]
    return "".join(f"{frame.filename}:{frame.lineno}: " for frame in (own_frames or frames)[-1:])


def describe_object(value: Any) -> str:
    """Return what a run records of an object that a script has passed, such as "a function of the script,
    __main__.score"."""
    while hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    kind = "a class" if inspect.isclass(value) else "a function" if named is value else "an object"
    return f"{kind}{OF_SCRIPT}{named.__module__ or '__main__'}.{named.__qualname__}"


def nearest(name: str, names: Iterable[str], group: str = "") -> str:
    """Words behind an error on a name that suggest the nearest of ``names``; "" if none is near, or a package that is
    not installed has the name itself, as an entry point of ``group``."""
    candidates = list(names)
    is_absent = group and name not in candidates and find_package(group, name)
    return "" if is_absent else suggest_nearest(name, candidates)


def _list_defined_names(module: ModuleType, wanted: str) -> str:
    named = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    own_names = [name for name, value in named.items() if getattr(value, "__module__", None) == module.__name__]
    return nearest(wanted, own_names) or (
        f"; it defines {', '.join(own_names)}" if own_names else "; it defines no function"
    )
