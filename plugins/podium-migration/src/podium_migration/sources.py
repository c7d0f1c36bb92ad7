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
from podium_migration.launchers import OF_TRL, read_launch, read_launch_options
from podium_migration.script_changes import ScriptChange, list_script_changes
from podium_migration.script_data import list_data_settings, read_trainer_data
from podium_migration.shell import UNDECIDED, read_script
from podium_migration.verl_programs import check_settings, choose_commands

__all__ = ["Settings", "explain_other_trainer", "read_leaves", "read_trl", "read_verl"]

_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_REFERENCE: Final = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^${}]*))?\}")
_OVERRIDE: Final = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)
_VERLS_OWN: Final = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")  # files of defaults
_TRL_CLASSES: Final = {"GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward"}
_TRL_TRAINERS: Final = {"GRPOTrainer": "grpo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "RewardTrainer": "reward"}
_TRL_PARTS: Final = ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig")  # settings of any trainer
_TRAINER_NAME: Final = re.compile(r"(\w+?)(?:Config|Trainer)")
_TRL_KINDS: Final = {  # what a command or a script is called, and the name of the trainer
    **{name: name.upper() for name in ("grpo", "sft", "dpo", "rloo", "kto", "ppo", "orpo", "cpo", "gkd", "bco", "prm")},
    **{"reward": "Reward", "xpo": "XPO", "nash_md": "NashMD", "online_dpo": "OnlineDPO", "dpo_online": "OnlineDPO"},
}
_KINDS_BY_NAME: Final = {name: kind for kind, name in _TRL_KINDS.items()}
_SCRIPT_NAME: Final = re.compile(rf"(?<![a-z])({'|'.join(sorted(_TRL_KINDS, key=len, reverse=True))})(?![a-z])")
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


class Settings(NamedTuple):
    """Settings by their dotted names.

    Attributes:
        values: Their values.
        undecided: Names of settings whose values the file does not say, such as those that a condition decides.
        recipe: The recipe of the project, such as "grpo". It is empty where the file does not name one.
        processes: Number of processes that the file starts; 0 where it says none.
        changes: What a script does to the training that no setting says.
    """

    values: dict[str, Any]
    undecided: list[str]
    recipe: str = ""
    processes: int = 0
    changes: tuple[ScriptChange, ...] = ()


def read_verl(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read the overrides of a shell script that starts verl, or a YAML file, and then ``overrides`` in Hydra's form.

    Raises:
        ConfigError: The file cannot be read, says no setting of verl, or runs another program than its PPO trainer.
    """
    text, changes = _read_text(path), list[ScriptChange]()
    if path.suffix in (".yaml", ".yml"):
        words, values = [], _read_settings(path, text)
    else:
        script = read_script(text, os.environ)
        commands = [words for words in script.commands if any("verl" in word for word in words)] or script.commands
        commands, remarks = choose_commands(path, commands)
        changes += [ScriptChange(*remark) for remark in remarks]
        words = [word for command in commands for word in command]
        values = _read_hydra(path, words)
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
    check_settings(path, values)
    return Settings(values, undecided, changes=tuple(changes))


def _read_settings(path: Path, text: str) -> dict[str, Any]:
    content = _read_yaml(path, text)
    return dict(read_leaves({name: value for name, value in content.items() if name not in ("defaults", "hydra")}))


def _read_hydra(path: Path, words: Sequence[str]) -> dict[str, Any]:
    """The settings of the file that words name by ``--config-name``; the option itself where that file is elsewhere."""
    options = dict(_list_options([word for word in words if not _OVERRIDE.fullmatch(word)]))
    options = {name.replace("_", "-"): value.removesuffix(".yaml") for name, value in options.items()}
    name, folder = options.get("config-name", ""), options.get("config-path", "")
    for directory in (Path(folder), path.parent / folder, Path(), path.parent, path.parent / "config"):
        file = directory / f"{name}.yaml"
        if name and UNDECIDED not in str(file) and file.is_file():
            return _read_settings(file, _read_text(file))
    return {} if name in ("", *_VERLS_OWN) else {"--config-name": name.replace(UNDECIDED, "…")}


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
        settings = _read_options(path, text)
    for word in overrides:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no setting of TRL: write NAME=VALUE, as in learning_rate=1e-6")
        settings.values[name] = _read_value(value)
        settings.undecided[:] = [other for other in settings.undecided if other != name]
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


def _read_options(path: Path, text: str) -> Settings:
    """The options of ``trl grpo --name value``, or of a script of TRL's form, with those of ``accelerate launch``."""
    values = dict[str, Any]()
    undecided = list[str]()
    processes, remarks = 0, list[ScriptChange]()
    commands = [(words, *_find_trainer(words)) for words in read_script(text, os.environ).commands]
    kinds = [kind for _, _, kind in commands if kind]
    for words, start, kind in commands:
        launch = read_launch(words[:start], path.parent)
        options = dict(_list_options(words[start:]))
        if start and os.path.basename(words[start - 1]) == "trl":
            launch = read_launch_options(
                {name: options.pop(name) for name in OF_TRL if name in options}, folder=path.parent
            )
        processes, remarks = launch.processes or processes, [*remarks, *launch.remarks]
        if (file := options.pop("config", "")) and (kind or not kinds):  # of another program, such as a server
            values |= _read_named(path, file)
        for name, value in options.items():
            if UNDECIDED in value:
                values.pop(name, None)
                undecided.append(name)
            else:
                values[name] = _read_value(value)
    return Settings(values, undecided, _choose_recipe(path, kinds), processes, tuple(remarks))


def _find_trainer(words: Sequence[str]) -> tuple[int, str]:
    """Return the place of the word of a command that names a trainer of TRL, and the trainer's kind.

    The word is that behind ``trl``, a script, or a module behind ``-m``. The kind is "" if the word says none.
    """
    pairs = [*enumerate(itertools.pairwise(["", *words]))]
    for index, (before, word) in pairs:
        if os.path.basename(before) == "trl" and not word.startswith("-"):
            return index, word if word in _TRL_KINDS else ""
    scripts = [index for index, (_, word) in pairs if word.endswith(".py")]
    modules = [index for index, (before, word) in pairs if before in ("-m", "--module") and word not in _LAUNCHERS]
    if not scripts and not modules:
        return 0, ""
    index = [*scripts, *modules][0]
    name = os.path.basename(words[index].removesuffix(".py")).rpartition(".")[2]
    kind = _SCRIPT_NAME.search(name.lower())
    return index, kind[1] if kind else ""


def _read_named(path: Path, file: str) -> dict[str, Any]:
    """The settings of the YAML file that a script names by ``--config``.

    Raises:
        ConfigError: There is no such file, here or beside the script, or it cannot be read.
    """
    for candidate in (Path(file), path.parent / file):
        if UNDECIDED not in file and candidate.is_file():
            return _read_yaml(candidate, _read_text(candidate))
    shown = file.replace(UNDECIDED, "…")
    raise ConfigError(
        f"{path} takes settings from the file {shown}, which is neither here nor beside the script: start podium "
        "config where the script starts, or convert that file, with the options of the script behind it as NAME=VALUE"
    )


def _choose_recipe(path: Path, kinds: Sequence[str]) -> str:
    """Return the one of ``kinds``, trainers of TRL, that a file uses; "" if it uses none.

    Raises:
        ConfigError: The file uses several, or one that is not converted.
    """
    different = list(dict.fromkeys(kinds))
    for kind in different:
        if kind not in _TRL_CLASSES.values():
            raise ConfigError(f"{path} uses TRL's {explain_other_trainer(_TRL_KINDS.get(kind, kind))}")
    if len(different) > 1:
        raise ConfigError(
            f"{path} uses several trainers of TRL, {', '.join(f'{_TRL_KINDS[kind]}Trainer' for kind in different)}: a "
            "configuration is of one; put each into a file of its own"
        )
    return different[0] if different else ""


def explain_other_trainer(name: str) -> str:
    """Return the name of a trainer whose settings are not converted, and what to do with them."""
    remark = _OTHER_TRAINERS.get(name, "Podium has none; docs/coming-from-trl.md lists what it has")
    return f"{name}Trainer, which is not converted: {remark}. Those that are converted: {', '.join(_TRL_TRAINERS)}"


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
    imported = _list_imported(tree)
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
    kinds = list[str]()
    for call in calls:
        origin = _trace(call.func, imported)
        name = origin.rpartition(".")[2]
        named = _name_arguments(call, name, constants)
        if name == "LoraConfig":
            values["use_peft"] = True
            values |= {key: value for key, value in _OF_PEFT.items() if key not in {*named, *undecided}}
        if (kind := _TRAINER_NAME.fullmatch(name)) and name not in _TRL_PARTS:
            converted = name in _TRL_CLASSES or name in _TRL_TRAINERS
            kinds += [_KINDS_BY_NAME.get(kind[1], kind[1])] if converted or origin.startswith("trl.") else []
        _evaluate_all(named, constants, definitions, values, undecided)
    assigned = _list_assigned(tree, imported)
    values = {key: value for key, value in values.items() if key not in assigned}
    undecided = [key for key in undecided if key not in assigned]
    _evaluate_all(assigned, constants, definitions, values, undecided)
    data = list_data_settings(
        read_trainer_data(tree, _TRL_TRAINERS, lambda function: _trace(function, imported)),
        lambda node: _evaluate(node, constants, {}),
        is_named="dataset_name" in values,
    )
    changes = [*list_script_changes(tree, _TRL_TRAINERS), *data.changes]
    return Settings(
        values | data.values, [*undecided, *data.undecided], _choose_recipe(path, kinds), changes=tuple(changes)
    )


def _name_arguments(call: ast.Call, name: str, constants: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """The settings that a call gives, by TRL's names; ``name`` is what is called."""
    words = {word.arg: word.value for word in call.keywords if word.arg}
    if name in _TRL_CLASSES or name in _TRL_PARTS:
        for word in call.keywords:
            if word.arg is None:
                words = {**_unpack(word.value, constants), **words}
        return words
    if name == "LoraConfig":
        return {f"lora_{_LORA.get(key, key)}": value for key, value in words.items()}
    if name in _TRL_TRAINERS:
        words |= zip(("model", "reward_funcs") if name == "GRPOTrainer" else ("model",), call.args, strict=False)
        return {_TRAINER[key]: value for key, value in words.items() if key in _TRAINER}
    return {}


def _unpack(node: ast.expr, constants: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """The settings of ``**node``; a name that is undecided where the script does not write them out."""
    mapping = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(mapping, ast.Call) and ast.unparse(mapping.func) == "dict" and not mapping.args:
        return {str(word.arg): word.value for word in mapping.keywords}
    if isinstance(mapping, ast.Dict) and all(isinstance(key, ast.Constant) for key in mapping.keys):
        return {
            str(ast.literal_eval(key)): value for key, value in zip(mapping.keys, mapping.values, strict=True) if key
        }
    return {f"**{ast.unparse(node)}": ast.Name("", ast.Load())}


def _list_assigned(tree: ast.Module, imported: Mapping[str, str]) -> dict[str, ast.expr]:
    """The settings that are assigned to a configuration of TRL after it is made: ``args.beta = 0.1``."""
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    configurations = {
        ast.unparse(target)
        for node in assignments
        if isinstance(node.value, ast.Call) and _trace(node.value.func, imported).rpartition(".")[2] in _TRL_CLASSES
        for target in node.targets
    }
    return {
        target.attr: node.value
        for node in assignments
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in configurations
    }


def _evaluate_all(
    named: Mapping[str, ast.expr],
    constants: Mapping[str, ast.expr],
    definitions: Mapping[str, str],
    values: dict[str, Any],
    undecided: list[str],
) -> None:
    """Add settings to ``values``, or those that the script does not decide to ``undecided``."""
    for key, node in named.items():
        value = _evaluate(node, constants, definitions)
        if value is UNDECIDED:
            undecided.append(key)
        else:
            values[key] = value


def _list_imported(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a script imports stand for, with dots."""
    imported = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return imported


def _trace(function: ast.expr, imported: Mapping[str, str]) -> str:
    """Return what is called, by the name under which it is imported: ``trl.RLOOConfig`` for ``C`` of ``import … as
    C``."""
    first, dot, rest = ast.unparse(function).partition(".")
    return f"{imported.get(first, first)}{dot}{rest}"


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
