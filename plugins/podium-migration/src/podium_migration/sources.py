"""The settings that a file of another project gives: YAML, a shell script or a Python script. Nothing is run."""

import ast
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from podium.errors import ConfigError
from podium_migration.shell import UNDECIDED, read_script

__all__ = ["Settings", "read_leaves", "read_trl", "read_verl"]

_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_REFERENCE: Final = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^${}]*))?\}")
_OVERRIDE: Final = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)
_TRL_CLASSES: Final = {"GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward"}
_TRL_TRAINERS: Final = {"GRPOTrainer": "grpo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "RewardTrainer": "reward"}
_TRL_COMMANDS: Final = ("grpo", "sft", "dpo", "reward")


class Settings(NamedTuple):
    """Settings by their dotted names.

    Attributes:
        values: Their values.
        undecided: Names of settings whose values the file does not say, such as those that a condition decides.
        recipe: The recipe of the project, such as "grpo". It is empty where the file does not name one.
        processes: Number of processes that the file starts; 0 where it says none.
    """

    values: dict[str, Any]
    undecided: list[str]
    recipe: str = ""
    processes: int = 0


def read_verl(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read the overrides of a shell script that starts verl, or a YAML file, and then ``overrides`` in Hydra's form.

    Raises:
        ConfigError: The file cannot be read, or says no setting of verl.
    """
    text = _read_text(path)
    if path.suffix in (".yaml", ".yml"):
        content = _read_yaml(path, text)
        words = []
        values = dict(
            read_leaves({name: value for name, value in content.items() if name not in ("defaults", "hydra")})
        )
    else:
        values = {}
        script = read_script(text, os.environ)
        commands = [words for words in script.commands if any("verl" in word for word in words)] or script.commands
        words = [word for command in commands for word in command]
    undecided = list[str]()
    for word in [*words, *overrides]:
        match = _OVERRIDE.fullmatch(word)
        if word.startswith("~"):
            values.pop(word[1:].partition("=")[0], None)
        elif match and UNDECIDED in match[2]:
            undecided.append(match[1])
        elif match:
            values[match[1]] = _read_value(match[2])
            undecided = [name for name in undecided if name != match[1]]
    values = {name: value for name in values if (value := _resolve(values, name)) != "???"}
    undecided += [name for name, value in values.items() if "${" in str(value)]
    values = {name: value for name, value in values.items() if "${" not in str(value)}
    if not any("." in name for name in values):
        raise ConfigError(
            f"{path} gives no setting of verl: expected words such as data.train_batch_size=1024, or YAML"
        )
    return Settings(values, undecided)


def _resolve(values: Mapping[str, Any], name: str, depth: int = 10) -> Any:
    """The value of a setting, with that of another in place of ``${other}`` and ``${oc.select:other,default}``."""
    value = values[name]
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth == 0:
        return value
    other = f"{name.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
    if other in values:
        return _resolve(values, other, depth - 1)
    return value if match[2] is None else _read_value(match[2])


def read_trl(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read GRPOConfig(...) or another configuration of a Python script, options of a shell script, or a YAML file.

    Raises:
        ConfigError: The file cannot be read, or says no setting of TRL.
    """
    text = _read_text(path)
    if path.suffix in (".yaml", ".yml"):
        settings = Settings(_read_yaml(path, text), [])
    elif path.suffix == ".py":
        settings = _read_python(path, text)
    else:
        settings = _read_options(text)
    for word in overrides:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no setting of TRL: write NAME=VALUE, as in learning_rate=1e-6")
        settings.values[name] = _read_value(value)
    if not settings.values:
        raise ConfigError(
            f"{path} gives no setting of TRL: expected GRPOConfig(...), options such as --learning_rate in a shell "
            "script, or YAML; settings that the script takes from its command line go behind the file, as NAME=VALUE"
        )
    return settings


def read_leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each setting of a nested mapping."""
    for name, value in values.items():
        inner = f"{path}.{name}".strip(".")
        if isinstance(value, Mapping) and value:
            yield from read_leaves(value, inner)
        else:
            yield inner, value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, and a configuration is a mapping")
    return _with_numbers(content)


def _read_value(text: str) -> Any:
    try:
        return _with_numbers(yaml.safe_load(text)) if text else ""
    except yaml.YAMLError:
        return text


def _with_numbers(value: Any) -> Any:
    """``value`` with numbers in place of text such as 1e-6, which YAML 1.1 reads as text, and None for "None"."""
    if isinstance(value, Mapping):
        return {str(name): _with_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    if value == "None":
        return None
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _read_options(text: str) -> Settings:
    """The options of ``trl grpo --name value``, or of a script of TRL's form, with those of ``accelerate launch``."""
    values = dict[str, Any]()
    undecided = list[str]()
    recipe, processes = "", 0
    for words in read_script(text, os.environ).commands:
        recipe = next((word for word in words[1:3] if words[0].endswith("trl") and word in _TRL_COMMANDS), recipe)
        scripts = [re.search(r"(grpo|sft|dpo|reward)", word) for word in words if word.endswith(".py")]
        recipe = recipe or next((match[1] for match in scripts if match), "")
        start = next((index for index, word in enumerate(words) if word.endswith((".py", *_TRL_COMMANDS))), 0)
        launcher = [item for word in words[:start] for item in word.split("=")]  # options of accelerate or torchrun
        for name, value in itertools.pairwise(launcher):
            if name.replace("-", "_") in ("__num_processes", "__nproc_per_node") and value.isdigit():
                processes = int(value)
        for name, value in _list_options(words[start:]):
            if UNDECIDED in value:
                undecided.append(name)
            elif name != "config":
                values[name] = _read_value(value)
    return Settings(values, undecided, recipe, processes)


def _list_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        items = [value] if equals else []
        while rest and not equals and not rest[0].startswith("--"):
            items.append(rest.pop(0).rstrip(","))
        yield name, f"[{', '.join(items)}]" if len(items) > 1 else items[0] if items else "true"


def _read_python(path: Path, text: str) -> Settings:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path} is no Python: {error}") from None
    definitions = {
        name: f"{path}:{name}" for node in ast.walk(tree) for name in [getattr(node, "name", "")] if _defines(node)
    }
    imported = {
        (alias.asname or alias.name): f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    definitions |= {name: origin for name, origin in imported.items() if name not in definitions}
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    values = dict[str, Any]()
    undecided = list[str]()
    recipe, other = "", ""
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _TRL_CLASSES:
            recipe = _TRL_CLASSES[name]
            named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        elif name == "LoraConfig":
            named = {f"lora_{_LORA.get(str(word.arg), word.arg)}": word.value for word in call.keywords if word.arg}
            values["use_peft"] = True
            values |= {key: value for key, value in _OF_PEFT.items() if key not in {*named, *undecided}}
        elif name in _TRL_TRAINERS:
            recipe = recipe or _TRL_TRAINERS[name]
            named = {_TRAINER[word.arg]: word.value for word in call.keywords if word.arg in _TRAINER}
        elif name == "load_dataset" and call.args and "dataset_name" not in values:
            named = {"dataset_name": call.args[0]}
            named |= {_DATASET[word.arg]: word.value for word in call.keywords if word.arg in _DATASET}
        else:
            other = name if imported.get(name, "").startswith("trl") and name.endswith(("Config", "Trainer")) else other
            continue
        for key, node in named.items():
            value = _evaluate(node, constants, definitions)
            if value is UNDECIDED:
                undecided.append(key)
            else:
                values[key] = value
    if other and not recipe:
        kind = other.removesuffix("Config").removesuffix("Trainer")
        remark = _OTHER_TRAINERS.get(kind, "Podium has none; docs/coming-from-trl.md lists what it has")
        raise ConfigError(
            f"{path} uses TRL's {other}, which is not converted: {remark}. Those that are converted: "
            f"{', '.join([*_TRL_CLASSES, *_TRL_TRAINERS])}"
        )
    return Settings(values, undecided, recipe)


def _defines(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


_PAIRS: Final = "is podium train dpo with algorithm.loss"
_OTHER_TRAINERS: Final = {
    "RLOO": "it is podium train grpo with algorithm.advantage rloo, where TRL's defaults are sampling.n 2, "
    "algorithm.kl_in reward, algorithm.kl_coef 0.05 and optim.lr 1e-6",
    "PPO": "it is podium train ppo",
    "KTO": f"it {_PAIRS} kto",
    "ORPO": f"it {_PAIRS} orpo",
    "CPO": f"with loss_type simpo it {_PAIRS} simpo",
    "GKD": "on the student's own completions it is podium train grpo --recipe opd",
}

_DATASET: Final = {"split": "dataset_train_split", "name": "dataset_config"}
_LORA: Final = {"lora_alpha": "alpha", "lora_dropout": "dropout"}
_OF_PEFT: Final = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # which are not those of TRL's ModelConfig
_TRAINER: Final = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "tools": "tools",
    "environment_factory": "environment_factory",
    "rollout_func": "rollout_func",
}


_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _evaluate(node: ast.expr, constants: Mapping[str, ast.expr], definitions: Mapping[str, str]) -> Any:
    """The value of an expression: plain values, constants of the module, and what ``definitions`` has for a name."""
    if isinstance(node, ast.Name) and node.id in constants and constants[node.id] is not node:
        return _evaluate(
            constants[node.id], {key: value for key, value in constants.items() if key != node.id}, definitions
        )
    if isinstance(node, ast.Name):
        return definitions.get(node.id, UNDECIDED)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_evaluate(side, constants, definitions) for side in (node.left, node.right))
        numbers = all(isinstance(side, int | float) for side in (left, right))
        return _OPERATORS[type(node.op)](left, right) if numbers and right != 0 else UNDECIDED
    if isinstance(node, ast.List | ast.Tuple):
        items = [_evaluate(item, constants, definitions) for item in node.elts]
        return UNDECIDED if UNDECIDED in items else items
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNDECIDED
