"""The files that a run's configuration names: where they were at the start, and where they are if they or the run have
moved.

``config.yaml`` holds their absolute paths. ``places.json`` beside it has an entry for each of these:

    {"/home/me/sums/train.jsonl": {
        "given": "train.jsonl",              as the user wrote it
        "from_run": "../../train.jsonl",     how it is reached from the run's directory
        "nbytes": 51200,                     size, of a directory that of all files in it
        "sha256": "…"}}                      of the content; null for more than 64 MiB

A file that is no longer at its absolute path is looked for from the run's directory, and then, as the user wrote it,
from the working directory. A name of the hub is no path, and stays as it is.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from podium.algorithms import AlgorithmConfig
from podium.config import build_config, config_to_dict, config_to_yaml
from podium.errors import ConfigError, DataError
from podium.runs.files import check_path
from podium.runs.run_files import RunFiles
from podium.runs.run_json import Count, read_json, write_json

_logger = logging.getLogger(__name__)
C = TypeVar("C")
Keys = tuple[str | int, ...]

PLACES: Final = "places.json"
_HEAD: Final = f"# Paths are absolute. If the run is moved, {PLACES} says where they are from its directory.\n"
_OBJECT: Final = "# The script also passed "
_OF_RUN: Final = ("engine", "options", "run")
_FILES: Final = (
    *(("model", "path"), ("model", "tokenizer"), ("critic", "path"), ("reward", "path")),
    *(("data", "chat_template"), ("algorithm", "options", "teacher"), _OF_RUN),
)
_FUNCTIONS: Final = (
    *(("environment", "name"), ("reward", "name")),
    *(("algorithm", "advantage"), ("algorithm", "loss"), ("algorithm", "correction"), ("run", "schedule")),
)
_WORDS: Final[Mapping[Keys, tuple[str, ...]]] = {("data", "chat_template"): ("auto", "none")}
_SUMMED: Final = 64 << 20  # bytes of content whose checksum is taken: a tenth of a second
_COUNTED: Final = 10_000  # files of a directory whose sizes are added


@dataclass(frozen=True, kw_only=True)
class _Place:
    """An entry of places.json. The module's docstring explains its fields."""

    given: str
    from_run: str
    nbytes: Count | None = None
    sha256: str | None = None

    def candidates(self, absolute: str, run: Path) -> dict[str, str]:
        """Yield the paths where the file may be, in the order in which they are tried, and how each was found."""
        origins = {absolute: ""}
        origins.setdefault(_join(run, self.from_run), f"{self.from_run} from the run")
        if not os.path.isabs(os.path.expanduser(self.given)):
            origins.setdefault(_absolute(self.given), f"{self.given} from the working directory")
        return origins


def record(config: Any, run: Path, objects: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the text of ``config.yaml``, with absolute paths, and that of ``places.json``.

    Comments say which defaults of the loss and the estimator stand for null, and which objects the script passed.

    Args:
        config: The configuration of the run. A value of it is a path if a file or directory is there.
        run: The run's directory. Entries that its places.json has already are kept.
        objects: Descriptions of what a script passed beside the settings, by role.
    """
    values, known_places = config_to_dict(config), _read(run)
    values["run"]["resume"] = ""  # a new run that is started with this file does not resume another run
    sets = config.data.eval_sets
    if not isinstance(config.data.eval, str) and list(sets) == list(config.data.eval):
        values["data"]["eval"] = dict(sets)  # names that are paths stay the names when the paths become absolute
    places = {path: asdict(entry) for path, entry in known_places.items()}
    for keys, path, function in _paths(values):
        if not _exists(path):
            continue
        absolute = str(check_path(Path(_absolute(path)), f"the path of {'.'.join(map(str, keys))}"))
        _put(values, keys, absolute + function)
        size, checksum = _content(absolute, deep=keys[0] == "data")
        was, before = _entry(absolute, known_places, run)
        path_as_given = before.given if before is not None and path in (absolute, was) else path
        from_run = os.path.relpath(absolute, run.absolute())
        places[absolute] = asdict(_Place(given=path_as_given, from_run=from_run, nbytes=size, sha256=checksum))
    text = config_to_yaml(build_config(type(config), values))
    algorithm = getattr(config, "algorithm", None)  # fine-tuning has none
    for key, (value, origin) in algorithm.explain().items() if isinstance(algorithm, AlgorithmConfig) else ():
        shown = str(value).lower() if isinstance(value, bool) else value
        text = text.replace(f"\n  {key}: null\n", f"\n  {key}: null  # {shown}, {origin}\n")
    head = (_HEAD if places else "") + "".join(f"{_OBJECT}{role}: {name}\n" for role, name in (objects or {}).items())
    return head + text, write_json(places, indent=2).decode() + "\n"


def read_objects(text: str) -> dict[str, str]:
    """Return descriptions of the objects that the script of a run passed, by role, from the text of ``config.yaml``."""
    lines = (line.removeprefix(_OBJECT) for line in text.splitlines() if line.startswith(_OBJECT))
    return {role: name for role, _, name in (line.partition(": ") for line in lines)}


def find_again(config: C, run: Path) -> C:
    """Return ``config`` with the current paths of the files that ``run`` was started with.

    Raises:
        ConfigError: Some files were not found. The message names their keys and the places that were searched.
    """
    values, missing = find_current_values(config_to_dict(config), run)
    if missing:
        raise ConfigError("\n".join(f"{line}; give its place with --{key}" for key, line in missing.items()))
    return build_config(cast("type[C]", type(config)), values)


def find_current_values(values: Mapping[str, Any], run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return nested values with the current paths of files, and a message for each key whose file was not found."""
    places, current = _read(run), deepcopy(dict(values))
    missing: dict[str, str] = {}
    for keys, path, function in _paths(values):
        entry = places.get(path)
        if entry is None:  # a name of the hub, or a path that the user has replaced
            continue
        candidates = entry.candidates(path, run)
        current_path = next((candidate for candidate in candidates if _exists(candidate)), None)
        if current_path is not None:
            _put(current, keys, current_path + function)
            continue
        key = ".".join(map(str, keys if keys[0] != "data" else keys[:2]))
        looked = [f"{candidate} ({how})" if how else candidate for candidate, how in candidates.items()]
        missing[key] = f"{key}: the file of the run is gone; it was looked for at {', '.join(looked)}"
    return current, missing


def remarks(config: Any, run: Path, needs: Sequence[str] = ()) -> list[str]:
    """Return remarks on files that have moved or changed since ``run`` began.

    ``needs`` are the keys and sections to look at. An empty collection means all of them.
    """
    places = _read(run)
    moved: dict[tuple[str, str], list[str]] = {}
    changed: dict[str, None] = {}
    for keys, path, _ in _paths(config_to_dict(config)):
        absolute, key = _absolute(path), ".".join(map(str, keys))
        was, entry = _entry(absolute, places, run)
        if entry is None or not _exists(absolute) or (needs and not is_needed(key, needs)):
            continue
        if was != absolute and not _exists(was):
            moved.setdefault(_roots(was, absolute), []).append(key)
        size, checksum = _content(absolute, deep=keys[0] == "data")
        if size != entry.nbytes or (entry.sha256 and checksum != entry.sha256):
            difference = _difference(entry.nbytes, size)
            changed[f"{key}: {absolute} has changed since the run began: {difference}"] = None
    lines = [f"moved from {was} to {now}: {', '.join(keys)}" for (was, now), keys in moved.items()]
    return [*lines, *changed]


def _roots(was: str, here: str) -> tuple[str, str]:
    """Return both paths without the last names that they have in common."""
    before, now = Path(was), Path(here)
    while before.name == now.name and before != before.parent and now != now.parent:
        before, now = before.parent, now.parent
    return str(before), str(now)


def is_needed(key: str, needs: Sequence[str]) -> bool:
    """Whether ``needs`` has the key, its section, or the key of which it is an entry."""
    return any(f"{key}.".startswith(f"{need}.") for need in needs)


def as_given(values: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the nested values of a run's ``config.yaml`` with paths as the user wrote them, for display."""
    try:
        places, shown = _read(run), deepcopy(dict(values))
    except (OSError, DataError) as error:
        _logger.warning("%s", error)
        return dict(values)
    for keys, path, function in _paths(values):
        if path in places:
            _put(shown, keys, places[path].given + function)
    return shown


def list_contents(values: Mapping[str, Any], run: Path) -> dict[tuple[str, str], str]:
    """Return what the files hold that the nested values of a run's ``config.yaml`` name: their checksums, or of large
    ones their sizes, by the dotted key and by the path as the user wrote it.

    A file has the key of its list or mapping of files. The directory of another run is left out, because it changes
    with what is done with that run.
    """
    places, contents = _read(run), dict[tuple[str, str], str]()
    for keys, path, _ in _paths(values):
        if keys == _OF_RUN or (entry := places.get(path)) is None or entry.nbytes is None:
            continue
        key = ".".join(key for key in keys if isinstance(key, str))
        contents[key, entry.given] = entry.sha256 or f"{entry.nbytes:,} bytes"
    return contents


def align_values(given: Mapping[str, Any], own: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the nested values ``given``, with the values ``own`` of ``run`` in place of paths that lead to the same
    files.

    A path leads to the same file in three cases. It is the path of the run's file. Or the run's file is gone, and the
    path is where the run would look for it. Or the run and its file were copied: the file has the same content, and the
    same path from the run's directory.
    """
    places, result = _read(run), deepcopy(dict(given))
    held_out, its = given["data"]["eval"], own["data"]["eval"]
    if isinstance(held_out, list) and isinstance(its, Mapping) and held_out == list(its):
        result["data"]["eval"] = dict(zip(held_out, held_out, strict=True))
    owned = {keys: (path, function) for keys, path, function in _paths(own)}
    for keys, path, function in _paths(result):
        was, own_function = owned.get(keys, ("", ""))
        entry = places.get(was)
        if entry is not None and function == own_function and _is_same(path, was, entry, run, deep=keys[0] == "data"):
            _put(result, keys, was + function)
    return result


def _is_same(path: str, was: str, place: _Place, run: Path, *, deep: bool) -> bool:
    absolute = _absolute(path)
    if not _exists(was):
        return absolute in place.candidates(was, run)
    if os.path.realpath(absolute) == os.path.realpath(was):
        return True
    return absolute == _join(run, place.from_run) and _content(absolute, deep=deep) == (place.nbytes, place.sha256)


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[Keys, str, str]]:
    """Yield each key whose value may be a path, the path, and what follows the path in the value, such as
    ``:function``."""
    held_out, train = (_read_value(values, ("data", name)) for name in ("eval", "train"))
    sources: list[Keys] = [("data", "train")]
    if isinstance(train, Mapping | list | tuple):  # a number means a key, where the sources are the keys of weights
        sources = [("data", "train", number) for number in range(len(train))]
    sets: list[Keys] = [("data", "eval")]
    if isinstance(held_out, Mapping):
        sets = [("data", "eval", str(name)) for name in held_out]
    elif isinstance(held_out, list | tuple):
        sets = [("data", "eval", number) for number in range(len(held_out))]
    functions: list[Keys] = []
    for keys in _FUNCTIONS:
        entries = _read_value(values, keys)
        functions += (
            [(*keys, number) for number in range(len(entries))]
            if isinstance(entries, Mapping | list | tuple)
            else [keys]
        )
    for keys in (*_FILES, *sources, *functions, *sets):
        value = _read_value(values, keys)
        if not isinstance(value, str):
            continue
        file, colon, name = value.rpartition(":")
        if keys in functions and file.endswith(".py"):
            yield keys, file, colon + name
        elif keys not in functions and value and value not in _WORDS.get(keys, ()):
            yield keys, value, ""


def _read_value(values: Any, keys: Keys) -> Any:
    """The value of nested keys; None where there is none. A number means an item of a list, or a key of a mapping."""
    for key in keys:
        if isinstance(key, int):
            values = [*values][key]
            continue
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _entry(here: str, places: Mapping[str, _Place], run: Path) -> tuple[str, _Place | None]:
    """Return the entry of the file that is now at ``here``, and the path where the file was before."""
    if here in places:
        return here, places[here]
    entries = ((was, entry) for was, entry in places.items() if here in entry.candidates(was, run))
    return next(entries, ("", None))


def _put(values: Any, keys: Keys, value: str) -> None:
    """Write the value of nested keys. A number means an item of a list, or a key of a mapping, which is renamed."""
    for key in keys[:-1]:
        values = values[key]
    last = keys[-1]
    if isinstance(last, int) and isinstance(values, dict):
        entries = [*values.items()]
        entries[last] = (value, entries[last][1])
        values.clear()
        values.update(entries)
    else:
        values[last] = value


def _absolute(path: str) -> str:
    return os.path.normpath(os.path.join(os.getcwd(), os.path.expanduser(path)))


def _join(run: Path, path: str) -> str:
    return os.path.normpath(run.absolute() / path)


def _files(path: str, *, deep: bool) -> Iterator[str]:
    """Return the files at a path in a fixed order: the file itself, those of a pattern, or those of a directory.

    Folders in a directory are read only if ``deep`` is True, because a model's directory may hold other things, such as
    runs.
    """
    if os.path.isdir(path):
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(inner) if deep else ()
            yield from (os.path.join(folder, name) for name in sorted(names))
    elif os.path.isfile(path):
        yield path
    elif glob.has_magic(path):
        yield from (name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name))


def _exists(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.exists(path) or (glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None)


def _content(path: str, *, deep: bool) -> tuple[int | None, str | None]:
    """Return the size of what is at ``path``, and its checksum unless it is large. None stands for what cannot be
    read."""
    files: list[str] = []
    for file in _files(path, deep=deep):
        files.append(file)
        if len(files) > _COUNTED:
            return None, None
    try:
        size = sum(os.path.getsize(file) for file in files)
        if size > _SUMMED:
            return size, None
        hasher = hashlib.sha256()
        for file in files:
            with open(file, "rb") as opened:
                hasher.update(hashlib.file_digest(opened, "sha256").digest())
        return size, hasher.hexdigest()
    except OSError:
        return None, None


def _difference(before: int | None, now: int | None) -> str:
    if before is None or now is None or before == now:
        return "its content differs"
    return f"it had {before:,} bytes and now has {now:,}"


def _read(run: Path) -> Mapping[str, _Place]:
    """Return the entries of places.json by their absolute paths; none if there is no such file. Raises DataError for
    other content."""
    with suppress(FileNotFoundError):
        return read_json(dict[str, _Place], RunFiles(run).read_small(PLACES), run / PLACES)
    return {}
