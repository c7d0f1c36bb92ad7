"""What a Python script of TRL does to the training beside its settings: to rows, to the trainer, to the tokenizer."""

import ast
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple


class ScriptChange(NamedTuple):
    """A line of a script that changes the training, and what it means for a configuration."""

    subject: str
    remark: str


def list_script_changes(tree: ast.Module, trainers: Mapping[str, str]) -> list[ScriptChange]:
    """Return what a script does that no setting says, in the order of its lines. ``trainers`` are names of classes."""
    names = _find_data_names(tree, trainers)
    changes = list[tuple[tuple[int, int], ScriptChange]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            subjects = [*_list_data_subjects(node, names), *_list_trainer_subjects(node, trainers)]
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            subjects = [(node.name, _SUBCLASS) for base in bases if base in trainers]
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
            subjects = [(ast.unparse(target), _TEMPLATE) for target in targets if target.attr == "chat_template"]
        else:
            continue
        order = (node.lineno, node.end_col_offset or 0)  # the calls of a chain begin in one column
        changes += [(order, ScriptChange(f"{subject} (line {node.lineno})", remark)) for subject, remark in subjects]
    return [change for _, change in sorted(changes, key=lambda item: item[0])]


_ROWS: Final = (
    "the script changes rows or columns here, and data.train above is the data set as it is loaded: write the changed "
    "one by its method to_json, and name that file as data.train; data.prompt_column and data.system_prompt do what "
    "most calls of map do"
)
_SUBCLASS: Final = "a trainer of the script's own: what its methods change is not read"
_TEMPLATE: Final = "the script sets a chat template: write it to a file, and name that as data.chat_template"
_METHODS: Final = frozenset(
    {
        *("filter", "map", "select", "shuffle", "sort", "shard", "skip", "take", "repeat", "batch", "flatten"),
        *("cast", "cast_column", "class_encode_column", "align_labels_with_mapping", "set_transform", "with_transform"),
        *("rename_column", "rename_columns", "remove_columns", "select_columns", "add_column", "add_item"),
        "train_test_split",
    }
)
"""The methods of a data set of the library datasets that change its rows or columns, or their order."""
_COMBINING: Final = frozenset({"concatenate_datasets", "interleave_datasets"})
_LOADING: Final = frozenset({"load_dataset", "load_from_disk", "get_dataset"})
_CLASSES: Final = frozenset({"Dataset", "DatasetDict", "IterableDataset"})
_ARGUMENTS: Final = {
    "formatting_func": "a function makes the texts of rows: data.prompt_column and data.answer_column take templates",
    "data_collator": "the rows of a batch are put together by Podium",
    "optimizers": "the optimizer is AdamW, by the section optim",
    "optimizer_cls_and_kwargs": "the optimizer is AdamW, by the section optim",
    "compute_loss_func": "a loss is a function of about twenty lines: docs/algorithms.md writes one",
    "callbacks": "what a callback changes is not read: eval.patience stops early, and a sink gets every event",
    "ref_model": "the reference is the policy's initial model",
    "model_init": "the model is that of the section model",
    "quantization_config": "adapters (model.lora.rank) train over weights in bfloat16 or float32",
}
"""Arguments of a trainer that change the training and that no key takes."""


def _list_data_subjects(call: ast.Call, names: set[str]) -> Iterator[tuple[str, str]]:
    """The call, if it makes rows or changes those of a data set."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value).rpartition(".")[2]
        makes = owner in _CLASSES and function.attr.startswith("from_")
        if makes or (function.attr in _METHODS and _is_data(function.value, names)):
            first = owner if makes else _name_root(function.value)
            yield f"{first}.{function.attr}", _ROWS
        elif function.attr in _COMBINING:
            yield function.attr, _ROWS
    elif isinstance(function, ast.Name) and function.id in _COMBINING:
        yield function.id, _ROWS


def _list_trainer_subjects(call: ast.Call, trainers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if ast.unparse(call.func).rpartition(".")[2] in trainers:
        for word in call.keywords:
            is_none = isinstance(word.value, ast.Constant) and word.value.value is None
            if word.arg in _ARGUMENTS and not is_none:
                yield str(word.arg), _ARGUMENTS[str(word.arg)]


def _find_data_names(tree: ast.Module, trainers: Mapping[str, str]) -> set[str]:
    """The names that stand for a data set, and those of functions that return one."""
    names = set[str](_LOADING | _COMBINING)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    before = -1
    while len(names) > before:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and _is_data(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [part for target in targets for part in ast.walk(target)]
                names |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
            elif isinstance(node, ast.Call):
                names |= _find_arguments(node, names, functions, trainers)
        names |= {name for name, function in functions.items() if _returns_data(function, names)}
    return names


def _find_arguments(
    call: ast.Call, names: set[str], functions: Mapping[str, ast.FunctionDef], trainers: Mapping[str, str]
) -> set[str]:
    """The names of data sets that a call shows: those given to a trainer, and parameters that get a data set."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in trainers:
        data = [word.value for word in call.keywords if word.arg in ("train_dataset", "eval_dataset")]
        return {_name_root(value) for value in data} - {""}
    if name not in functions or not isinstance(call.func, ast.Name):
        return set()
    parameters = [parameter.arg for parameter in functions[name].args.args]
    passed = {*(pair for pair in zip(parameters, call.args, strict=False)), *((w.arg, w.value) for w in call.keywords)}
    return {parameter for parameter, value in passed if parameter and _is_data(value, names)}


def _returns_data(function: ast.FunctionDef, names: set[str]) -> bool:
    return any(isinstance(node, ast.Return) and _is_data(node.value, names) for node in ast.walk(function))


def _is_data(node: ast.AST | None, names: set[str]) -> bool:
    """Whether an expression is a data set, a part of one, or what a method makes of it."""
    root = _find_root(node)
    if isinstance(root, ast.Call):
        function = ast.unparse(root.func)
        return function.rpartition(".")[2] in names or function.rpartition(".")[0].rpartition(".")[2] in _CLASSES
    return isinstance(root, ast.Name) and root.id in names


def _find_root(node: ast.AST | None) -> ast.AST | None:
    """The name or the call by which a chain of methods and items begins."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _loads(node.func):
            node = node.func.value
        else:
            return node


def _loads(function: ast.Attribute) -> bool:
    """Whether a function with a dot makes a data set: ``datasets.load_dataset``, ``Dataset.from_list``."""
    owner = ast.unparse(function.value).rpartition(".")[2]
    return function.attr in _LOADING | _COMBINING or owner in _CLASSES


def _name_root(node: ast.AST) -> str:
    root = _find_root(node)
    if isinstance(root, ast.Call):
        return ast.unparse(root.func).rpartition(".")[2]
    return root.id if isinstance(root, ast.Name) else ""
