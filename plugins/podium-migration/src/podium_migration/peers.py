"""The settings of the other projects with their defaults, read from the files of an installed package.

Nothing of the package is imported: verl's settings are YAML, and those of the others are read as syntax trees. So an
unpacked wheel on ``PYTHONPATH`` is as good as an installation.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from podium.config import keys_of
from podium.installed import has_library
from podium.runs.recipes import find_recipe
from podium_migration.sources import read_leaves
from podium_migration.tables import Equivalent, read_tables

__all__ = ["PEERS", "UNKNOWN", "find_package", "find_problems", "read_settings"]

UNKNOWN = object()
"""The default of a setting that is not written as a plain value."""


def find_package(name: str) -> Path | None:
    """Return the directory of an installed package, or None. The package is not imported."""
    spec = find_spec(name) if has_library(name) else None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def read_settings(peer: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a peer by recipe, each a mapping of dotted names to defaults. Empty if it is absent."""
    package, read = PEERS[peer]
    directory = find_package(package)
    return {} if directory is None else read(directory)


def find_problems(peer: str, settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each setting of a peer that has no answer, or whose default the table does not have."""
    table = next(table for table in read_tables() if table.project.lower() == peer)
    problems = dict[str, None]()
    for recipe, defaults in settings.items():
        for name, default in defaults.items():
            answer = table.find(name)
            if answer is None:
                problems[f"{peer} has {name}, which the table does not answer"] = None
            elif not _is_plain(default):
                continue
            elif (stated := _default_of(answer, recipe)) is not None:
                if not _equal(stated, default):
                    problems[f"{peer} {recipe}: {name} is {default!r} by default, and {stated!r} in the table"] = None
            elif answer.key and not answer.rule and _differs(answer, default, recipe):
                problems[f"{peer} {recipe}: {name} is {default!r} by default; the table says no default"] = None
    return list(problems)


def _default_of(answer: Equivalent, recipe: str) -> Any:
    """The default that the table states for a recipe of the peer."""
    return answer.default.get(recipe) if isinstance(answer.default, dict) and answer.default else answer.default


def _differs(answer: Equivalent, default: Any, recipe: str) -> bool:
    """Whether Podium's default means something else than the peer's."""
    translation = answer.translate(default)
    value = default if translation is None else translation.value
    ours = {key.path: key.default for key in keys_of(find_recipe(_RECIPES.get(recipe, "grpo")).config)}
    return answer.key in ours and value is not None and not _equal(value, ours[answer.key])


_RECIPES = {"sft": "sft", "dpo": "dpo", "reward": "rm", "rm": "rm"}


def _is_plain(default: Any) -> bool:
    """Whether a default is a value, and none that is computed or must be given."""
    return default not in (UNKNOWN, Ellipsis, "???") and "${" not in str(default)


def _equal(first: Any, second: Any) -> bool:
    if first == "null":  # as the tables write a default that is None
        return second is None
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return [*map(str, first)] == [*map(str, second)]
    if isinstance(first, int | float) and isinstance(second, int | float):
        return float(first) == float(second)
    return first == second


def _read_verl(directory: Path) -> dict[str, dict[str, Any]]:
    config = directory / "trainer" / "config"
    files = {"fsdp": "_generated_ppo_trainer.yaml", "megatron": "_generated_ppo_megatron_trainer.yaml"}
    return {
        name: dict(read_leaves(yaml.safe_load((config / file).read_text(encoding="utf-8"))))
        for name, file in files.items()
        if (config / file).is_file()
    }


def _read_trl(directory: Path) -> dict[str, dict[str, Any]]:
    """Each configuration with what it inherits, from TrainingArguments of transformers upward."""
    trainer = directory / "trainer"
    transformers = find_package("transformers")
    files = [trainer / f"{name}_config.py" for name in ("base", "grpo", "sft", "dpo", "reward", "model")]
    files += [directory / "scripts" / "utils.py"]
    classes = {node.name: node for path in files if path.is_file() for node in _classes(path)}
    if transformers is not None:
        classes |= {node.name: node for node in _classes(transformers / "training_args.py")}
    recipes = {"grpo": "GRPOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardConfig"}
    recipes |= {"model": "ModelConfig", "script": "ScriptArguments"}
    return {name: _fields(classes, cls) for name, cls in recipes.items() if cls in classes}


def _read_prime_rl(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted((directory / "configs").glob("*.py"))
    classes = {node.name: node for path in files for node in _classes(path)}
    recipes = {"rl": "RLConfig", "sft": "SFTConfig", "trainer": "TrainerConfig", "orchestrator": "OrchestratorConfig"}
    aliases = {
        target.id: node.value
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    aliases |= {
        node.target.id: node.value
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    return {name: dict(_nested(classes, aliases, cls, "", ())) for name, cls in recipes.items() if cls in classes}


def _read_openrlhf(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        path.stem.removeprefix("train_"): dict(_arguments(path))
        for path in sorted((directory / "cli").glob("train_*.py"))
    }


PEERS: Mapping[str, tuple[str, Callable[[Path], dict[str, dict[str, Any]]]]] = {
    "verl": ("verl", _read_verl),
    "trl": ("trl", _read_trl),
    "prime-rl": ("prime_rl", _read_prime_rl),
    "openrlhf": ("openrlhf", _read_openrlhf),
}


# -- syntax trees ----------------------------------------------------------------------------------------------------


def _classes(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _fields(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, Any]:
    """The fields of a dataclass and of its bases, with their defaults."""
    node = classes[name]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    fields = {key: value for base in bases for key, value in _fields(classes, base).items()}
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if not line.target.id.startswith("_") and "ClassVar" not in ast.dump(line.annotation):
            fields[line.target.id] = _default(line.value)
    return fields


def _nested(
    classes: Mapping[str, ast.ClassDef],
    aliases: Mapping[str, ast.expr],
    name: str,
    prefix: str,
    above: tuple[str, ...],
) -> Iterator[tuple[str, Any]]:
    """The settings of a model of pydantic, those of the models in it included."""
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _nested(classes, aliases, base.id, prefix, above)
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        path = f"{prefix}.{line.target.id}".strip(".")
        inner = [cls for cls in _names(line.annotation, aliases) if cls in classes and cls not in above]
        if line.target.id == "model_config" or line.target.id.startswith("_"):
            continue
        if not inner:
            yield path, _default(line.value)
        for cls in inner:
            yield from _nested(classes, aliases, cls, path, (*above, cls))


def _names(annotation: ast.AST, aliases: Mapping[str, ast.expr]) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
            if node.id in aliases:
                yield from _names(aliases[node.id], {key: aliases[key] for key in aliases if key != node.id})


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # field(default=…), Field(…)
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in named:
            return _default(named["default"])
        if isinstance(value.func, ast.Name) and value.func.id == "Field" and value.args:
            return _default(value.args[0])
        return UNKNOWN
    if value is None:
        return UNKNOWN
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNKNOWN


def _arguments(path: Path) -> Iterator[tuple[str, Any]]:
    """The options of a script's parser. Those that a loop adds for several prefixes are written out."""
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), {})


def _walk(node: ast.AST, variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
        for item in node.iter.elts:
            for line in node.body:
                yield from _walk(line, {**variables, node.target.id: str(getattr(item, "value", ""))})
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        default = named.get("default")
        if isinstance(default, ast.IfExp) and isinstance(default.test, ast.Compare):  # one default for each prefix
            test = default.test
            holds = variables.get(getattr(test.left, "id", "")) == getattr(test.comparators[0], "value", None)
            default = default.body if holds else default.orelse
        for word in node.args:
            text = _text(word, variables)
            if text.startswith("--"):
                yield text[2:], _default(default) if default or "action" not in named else False
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, variables)


def _text(node: ast.expr, variables: Mapping[str, str]) -> str:
    """The text of a literal, or of one with the names of ``variables`` in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, variables) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return variables.get(getattr(node.value, "id", ""), "")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def main() -> int:
    """Print what is wrong in the tables, for each peer that is installed. Returns 1 if something is."""
    status = 0
    for peer in PEERS:
        settings = read_settings(peer)
        problems = find_problems(peer, settings)
        status = status or bool(problems)
        count = len({name for defaults in settings.values() for name in defaults})
        text = f"{count} settings, {len(problems)} problems" if settings else "not installed"
        sys.stdout.write("\n".join([f"{peer}: {text}", *problems]) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
