"""Code that a run's configuration names, and the record of what this user's runs have named.

    config.yaml ─▶ names that are not Podium's own ─▶ given again, or in the record? ─▶ loaded, or refused

A run's directory may come from somebody else, who has written all of it. So the record is elsewhere: in
``$XDG_STATE_HOME/podium/runs/ID.json``, which is below ``~/.local/state`` by default:

    {"begun": true,                        this user began the run, and has not only resumed it
     "inode": [66306, 5242881],            that of the run's directory, which no copy of the directory has
     "code": [[["reward", "name"], "/home/me/reward.py:score", "/home/me/reward.py", "SHA-256 of that file"]]}

The id is in the run's file ``.id``. A copied id leads to names that this user has chosen, and to no other ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast
from uuid import uuid4

import yaml

from podium.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, AlgorithmConfig
from podium.config import build_config, config_to_dict
from podium.errors import ConfigError, DataError
from podium.functions import OF_SCRIPT, find_installed, is_installed
from podium.rewards.resolve import GROUP, NAMED_REWARDS
from podium.rollout.engines.config import AUTO, OWN_OPTIONS, REPLAY, find_engines
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.rows import find_generator, is_generated
from podium.runs.files import LOCK
from podium.runs.named_files import PLACES, find_again, find_current_values
from podium.runs.run_files import RunFiles
from podium.runs.schedules import SCHEDULES
from podium.runs.trackers import find_tracker

C = TypeVar("C")
Keys = tuple[str, ...]

_ID_FILE: Final = ".id"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_FILES_OF_RUNS: Final = frozenset({_ID_FILE, LOCK, PLACES, "metrics.jsonl", "ledger.jsonl", "summary.json"})
_FUNCTION: Final = re.compile(r"(?s)(?P<place>.+):(?P<attribute>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_DATA_OPTIONS: Final = ("name", "revision")  # of load_dataset: neither leads to code, whatever the value is
_ATTENTION: Final = re.compile(r"\w+")  # anything else names a kernel of the hub, which is code
_MOST_RECORDS: Final = 10_000
_LARGEST: Final = 1 << 28


class _Code(NamedTuple):
    """A value of a configuration that names code, with the file of the code and the checksum of its content."""

    keys: Keys
    value: Any
    file: str = ""
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The record of a run. The module's docstring explains its fields."""

    begun: bool
    inode: tuple[int, int]
    code: Sequence[_Code]

    def allows(self, code: _Code, run: Path) -> bool:
        """Whether the run may load ``code`` because the run has named it before.

        The user may have edited the file since, if the user began the run. If the run's directory was moved together
        with the file, the content must be the same.
        """
        for before in self.code:
            if before.keys == code.keys and before.value == code.value:
                return self.begun or before.checksum == code.checksum
        is_moved = self.begun and bool(code.checksum) and self.inode == _inode(run)
        name = _attribute(code.value)
        return is_moved and any(
            (before.keys, before.checksum, _attribute(before.value)) == (code.keys, code.checksum, name)
            for before in self.code
        )


# -- what a configuration names --------------------------------------------------------------------------------------


def list_code(config: Any, sections: Collection[str] | None = None) -> Iterator[tuple[Keys, Any]]:
    """Yield each value that may name code and is not a name of Podium's own, with its keys.

    Of an engine, an environment, a loss and an advantage estimator that are not Podium's own, these are all options but
    numbers, because nobody here knows what they mean. The name of an engine, a reward, a tracker, a loss,
    an estimator or a correction of an installed package is not listed.

    Args:
        config: A configuration of a run, or of a model that is used.
        sections: Only values of these sections are listed; None means all sections.
    """
    for keys, value in _list_values(config):
        if sections is None or keys[0] in sections:
            yield keys, value


def _list_values(config: Any) -> Iterator[tuple[Keys, Any]]:
    if not _ATTENTION.fullmatch(config.model.attention):
        yield ("model", "attention"), config.model.attention
    yield from ((("reward", "name"), name) for name in config.reward.names if not _is_own_reward(name))
    if hasattr(config, "optim") and config.run.schedule not in SCHEDULES:
        yield ("run", "schedule"), config.run.schedule
    yield from _list_trackers(config) if hasattr(config, "optim") else ()
    algorithm = getattr(config, "algorithm", None)
    if isinstance(algorithm, AlgorithmConfig):
        losses = [name for name in algorithm.losses if name not in LOSSES]
        if algorithm.advantage not in ADVANTAGES:
            yield ("algorithm", "advantage"), algorithm.advantage
        yield from ((("algorithm", "loss"), name) for name in losses)
        corrections = [name for name in algorithm.corrections if name not in CORRECTIONS]
        yield from ((("algorithm", "correction"), name) for name in corrections)
        if algorithm.advantage not in ADVANTAGES or losses or corrections:
            yield from _list_options(("algorithm", "options"), algorithm.options)
    engine = config.engine
    if not _is_own_engine(engine.name):
        entry = find_engines().get(engine.name)
        if entry is None or not is_installed(entry):
            yield ("engine", "name"), engine.name
        yield from _list_options(("engine", "options"), engine.options)
    if config.environment.name:
        yield ("environment", "name"), config.environment.name
        yield from _list_options(("environment", "options"), config.environment.own_options)
    yield from _list_data(config.data)


def _list_data(data: DataConfig) -> Iterator[tuple[Keys, Any]]:
    sources = [source for source in (*data.train_sources, *data.eval_sets.values()) if source]
    for source in sources:
        if (entry := find_generator(source)) is not None and not is_installed(entry):
            yield ("data", "train" if source in data.train_sources else "eval"), source
    if not all(map(is_generated, sources)):
        options = {name: value for name, value in data.options.items() if name not in _DATA_OPTIONS}
        yield from _list_options(("data", "options"), options)


def _is_own_engine(name: str) -> bool:
    entry = find_engines().get(name)
    return name in (AUTO, REPLAY) or (name in OWN_OPTIONS and entry is not None and is_installed(entry))


def _is_own_reward(name: str) -> bool:
    if name in NAMED_REWARDS or OF_SCRIPT in name:  # an object that a script has passed, which no name loads
        return True
    entry = _find_entry(("reward", "name"), name)
    return entry is not None and is_installed(entry)


def _list_trackers(config: Any) -> Iterator[tuple[Keys, Any]]:
    keys = ("run", "trackers")
    for name in config.run.trackers:
        if (entry := _find_entry(keys, name)) is not None and not is_installed(entry):
            yield keys, name


def _find_entry(keys: Keys, name: str) -> EntryPoint | None:
    """Return the entry point that packages have for the name of a reward or a tracker."""
    if keys == ("run", "trackers"):
        return find_tracker(name)
    return find_installed(GROUP, name, "reward.name") if keys == ("reward", "name") and ":" not in name else None


def _list_options(keys: Keys, options: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _list_options((*keys, str(name)), value)
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield (*keys, str(name)), value


def _module_of_engine(name: str) -> str:
    entry = find_engines().get(name)
    return entry.module if entry is not None else ""


def _describe(config: Any, keys: Keys, value: Any) -> _Code:
    """Find the file of the code that a value names, and compute its checksum."""
    location = ""
    if not isinstance(value, str):
        value = json.loads(json.dumps(value, default=str))  # as the record has it
    else:
        if keys == ("engine", "name"):
            location = _module_of_engine(value)
        elif keys == ("environment", "name"):
            location = config.environment.code.rpartition(":")[0]
        elif (entry := _find_entry(keys, value)) is not None:
            location = entry.module
        elif match := _FUNCTION.fullmatch(value):
            location = match["place"]
            if keys[1] != "options" and location.endswith(".py"):
                value = f"{os.path.abspath(os.path.expanduser(location))}:{match['attribute']}"
        elif _is_file(value):
            location = value
    if not location:
        return _Code(keys, value)
    file = os.path.realpath(os.path.expanduser(_file_of(location)))
    return _Code(keys, value, file, _checksum(file)) if _is_file(file) else _Code(keys, value)


def _file_of(location: str) -> str:
    """Return the file ``location``, or that of the module ``location``; "" if there is none. No package is imported to
    find a module in it. Modules in the working directory count, because a program that an environment starts may find
    them there first."""
    if not location or location.endswith(".py") or os.sep in location or _is_file(location):
        return location
    name, *inner = location.split(".")
    try:
        local = PathFinder.find_spec(name, [os.getcwd()])
        spec = local if local and local.origin else find_spec(name) or local
        for part in inner:
            folders = None if spec is None else spec.submodule_search_locations
            spec = None if folders is None else PathFinder.find_spec(part, folders)
    except (ValueError, ImportError, OSError):  # a module without a specification, such as __main__, or no name of one
        return ""
    if spec is None or spec.origin in ("built-in", "frozen"):
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(os.path.expanduser(path))
    except ValueError:  # a zero byte
        return False


def _checksum(file: str) -> str:
    try:
        if os.path.getsize(file) > _LARGEST:
            return ""
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""


def _attribute(value: Any) -> str:
    return value.rpartition(":")[2] if isinstance(value, str) and ":" in value else ""


# -- what is refused -------------------------------------------------------------------------------------------------


def check_code(run: Path, config: Any, given: Collection[str] = (), sections: Collection[str] | None = None) -> None:
    """Check that ``config``, which was read from ``run``, names no code but Podium's own, what the user gives again,
    and what the user's own runs have named. This check loads none of it.

    Code in the run's directory is refused in any case.

    Args:
        run: The directory of the run.
        config: The configuration, with current paths.
        given: The dotted keys that the user has given, on the command line or in another file.
        sections: The sections that are used; None means all.

    Raises:
        ConfigError: There is other code. The message has the flags that give the names again.
    """
    record, records = _read_record(run, _read_id(run)), None
    given_keys = {tuple(key.split(".")) for key in given}
    refused: list[tuple[Keys, str]] = []
    for keys, value in list_code(config, sections):
        code = _describe(config, keys, value)
        _refuse_inside(run, code)
        if any(keys[: len(prefix)] == prefix for prefix in given_keys):
            continue
        if record is not None and record.allows(code, run):
            continue
        records = _read_records(run) if records is None else records
        if code.checksum and any(code in other.code for other in records):
            continue
        has_changed = record is not None and any(before[:2] == code[:2] for before in record.code)
        changed = f", whose file {code.file} has changed since" * has_changed
        refused.append((keys, f"{'.'.join(keys)} = {value!r}{changed}"))
    if refused:
        flags = " ".join(_write_flag(config, keys) for keys in dict(refused))
        remedy = ". Podium can keep no such record here: set XDG_STATE_HOME to a directory of yours" * (
            _folder(run) is None
        )
        raise ConfigError(
            f"{run} names code that is not Podium's own, and there is no record on this machine that you began this "
            f"run or have run this code: {'; '.join(text for _, text in refused)}. Read the code, and give it again if "
            f"it may run: {flags}{remedy}"
        )


def _write_flag(config: Any, keys: Keys) -> str:
    """The words of a command line that give the value of a key again."""
    value = config
    for key in keys:
        value = value[key] if isinstance(value, Mapping) else getattr(value, key)
    text = value
    if not isinstance(value, str) or ("options" in keys and yaml.safe_load(value) != value):
        text = json.dumps(list(value) if isinstance(value, tuple) else value)
    return f"--{'.'.join(keys)} {shlex.quote(text)}"


def _refuse_inside(run: Path, code: _Code) -> None:
    """Refuse code in the directory of a run: its neighbors and its bytecode are as little known as the run."""
    key = ".".join(code.keys)
    for text in _texts(code.value):
        match = _FUNCTION.fullmatch(text)
        is_program = _is_file(text) and (text.endswith(".py") or os.access(os.path.expanduser(text), os.X_OK))
        file = _file_of(match["place"]) if match else text if is_program else code.file
        file = os.path.expanduser(file)
        if os.path.lexists(file) and any(_is_in_run(Path(path), run) for path in (file, os.path.abspath(file))):
            raise ConfigError(
                f"{key} = {text!r} is code in the directory of the run itself, and Podium runs no code from there: "
                f"read {file}, move it elsewhere, and give its new path with --{key}"
            )


def _is_in_run(path: Path, run: Path) -> bool:
    """Whether ``path`` is below ``run``, by its name or through links."""
    try:
        return path.is_relative_to(run.absolute()) or path.resolve().is_relative_to(run.resolve())
    except (OSError, ValueError, RuntimeError):  # no text of a path, or a circle of links
        return False


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in nested values that may be paths."""
    if isinstance(value, str):
        yield from [value] if "\0" not in value else []
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)


def check_source(config: C, path: Path, given: Collection[str]) -> C:
    """Return ``config`` with the current paths of its files if the file at ``path``, from which it was read, is in the
    directory of a run; otherwise return ``config`` itself.

    Raises:
        ConfigError: As :func:`check_code`; or the file of a function is gone.
    """
    run, resumed = path.parent, cast("Any", config).run.resume
    with suppress(OSError, DataError):
        is_resumed = resumed not in ("", "auto") and os.path.realpath(resumed) == os.path.realpath(run)
        if not is_resumed and _FILES_OF_RUNS.isdisjoint(RunFiles(run).names()):
            return config
    values, missing = find_current_values(config_to_dict(config), run)
    if any(".".join(keys) in missing for keys, _ in list_code(config)):
        find_again(config, run)  # which names everything that is gone
    current = build_config(type(config), values)
    check_code(run, current, given)
    return current


# -- the record ------------------------------------------------------------------------------------------------------


def remember_code(run: Path, config: Any, *, begun: bool) -> None:
    """Record the code that the run in the directory ``run`` names.

    Without a directory for records nothing is recorded, and the next resume asks for the names of functions.

    Args:
        run: The directory of the run.
        config: Its configuration.
        begun: Whether the run is new. Otherwise it is resumed.
    """
    folder = _folder(run)
    number = None if begun else _read_id(run)
    before = _read_record(run, number)
    code = [_describe(config, keys, value) for keys, value in list_code(config)]
    if folder is None or not (code or before):
        return
    number = number or uuid4().hex
    content = {"begun": begun or (before is not None and before.begun), "inode": _inode(run), "code": code}
    with suppress(OSError, DataError, TypeError, ValueError):  # no place to write, or a value that JSON cannot hold
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        RunFiles(folder).write(json.dumps(content), f"{number}.json")
        RunFiles(run).write(number, _ID_FILE)


def _folder(run: Path) -> Path | None:
    """Return the directory of records; None where this user can have none that nobody else writes to."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".local", "state")
    folder = Path(base, "podium", "runs")
    if not folder.is_absolute() or _is_in_run(folder, run):
        return None
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if existing != folder:
        return folder if existing.is_dir() and os.access(existing, os.W_OK) else None
    status = folder.lstat()
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 and folder.is_dir() else None


def _read_id(run: Path) -> str | None:
    with suppress(OSError, DataError, ValueError):
        text = RunFiles(run).read_small(_ID_FILE).decode("ascii").strip()
        return text if _ID.fullmatch(text) else None
    return None


def _inode(run: Path) -> tuple[int, int]:
    status = run.stat()
    return status.st_dev, status.st_ino


def _read_record(run: Path, number: str | None) -> _Record | None:
    """Return the record of the run with this id; None if there is none that can be read."""
    folder = _folder(run)
    if folder is None or number is None:
        return None
    try:
        content = json.loads((folder / f"{number}.json").read_bytes())
        code = [_Code(tuple(keys), value, file, checksum) for keys, value, file, checksum in content["code"]]
        return _Record(begun=content["begun"] is True, inode=tuple(content["inode"]), code=code)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _read_records(run: Path) -> list[_Record]:
    folder = _folder(run)
    names = () if folder is None or not folder.is_dir() else islice(folder.glob("*.json"), _MOST_RECORDS)
    return [record for name in names if (record := _read_record(run, name.stem)) is not None]
