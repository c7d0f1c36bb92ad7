"""Which data sets a Python script of TRL loads, and which of them its trainer gets. Nothing of the script is run.

The arguments ``train_dataset`` and ``eval_dataset`` are followed through assignments, items, methods and functions of
the script to the calls that load them::

    rows = load_dataset("a/b")                  ──▶ train_dataset=rows["train"].map(f)     a/b, split train
    test = load_dataset("c/d", split="test")    ──▶ eval_dataset=test                      c/d, split test
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from podium_migration.script_changes import ScriptChange
from podium_migration.shell import UNDECIDED

LOADING: Final = frozenset({"load_dataset", "load_from_disk"})
"""The functions of the library datasets that load a data set."""
_COMBINING: Final = frozenset({"concatenate_datasets", "interleave_datasets"})
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNSURE: Final = (ast.If, ast.For, ast.While, ast.Try, ast.Match)
_LAST: Final = 10**9  # a line behind all lines
_DEEPEST: Final = 30
_MOST: Final = 20_000  # expressions that are followed
_FILES: Final = frozenset({"json", "csv", "parquet", "arrow", "text"})
"""What load_dataset calls the kinds of files that data_files name."""
_PLACES: Final = {"GRPOTrainer": 3, "SFTTrainer": 3, "DPOTrainer": 4, "RewardTrainer": 3}
"""The places of train_dataset among the arguments of trainers; eval_dataset follows it."""


@dataclass(frozen=True)
class Load:
    """A data set, or a part of one, that the script loads by ``call``.

    Attributes:
        words: The arguments of the call by their names.
        split: The split that is taken; None where the script names none.
        is_share: Whether it is a share of the rows that the script splits off.
        is_joined: Whether the script joins its rows with those of other data sets.
    """

    call: ast.Call
    words: Mapping[str, ast.expr]
    split: ast.expr | None = None
    is_share: bool = False
    is_joined: bool = False

    def take(self, item: ast.expr) -> "Load":
        """Return the part of this name or number."""
        if self.is_share or isinstance(item, ast.Slice):
            return self
        if not isinstance(item, ast.Constant):  # a name of the script
            return replace(self, split=item) if self.split is None else self
        if isinstance(self.split, ast.List | ast.Tuple) and isinstance(item.value, int):
            return replace(self, split=self.split.elts[item.value]) if item.value < len(self.split.elts) else self
        return replace(self, split=item) if isinstance(item.value, str) and self.split is None else self

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """The path, the name of the configuration, the files and the split, by these names, as far as the call has
        them."""
        words = {word.arg: word.value for word in self.call.keywords if word.arg}
        words = self.words
        path = words.get("path", words.get("dataset_path"))
        named = {"path": path, "name": words.get("name"), "split": self.split}
        if isinstance(path, ast.Constant) and path.value in _FILES and (files := words.get("data_files")):
            named = self._choose_file(files)
        return {name: value for name, value in named.items() if value is not None}

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for the same part of the same data set."""
        texts = [ast.unparse(part) if part is not None else "" for part in (*self.words.values(), self.split)]
        return self.call, *texts, self.is_share, self.is_joined

    def _choose_file(self, files: ast.expr) -> dict[str, ast.expr | None]:
        """The file of the split, which the library calls train where data_files has no names."""
        if not isinstance(files, ast.Dict):
            return {"path": files}
        names = [getattr(key, "value", None) for key in files.keys]
        split = getattr(self.split, "value", "train")
        return {"path": files.values[names.index(split)] if split in names else ast.Name("", ast.Load())}


@dataclass(frozen=True)
class TrainerData:
    """What a script loads for its trainer.

    Attributes:
        train: The data sets of ``train_dataset``.
        evaluation: The loads of ``eval_dataset``, by the names of the script; one without a name has the name "".
        others: The data sets that neither of the two gets.
        unread: The arguments of these two that lead to no such call, with their values.
    """

    train: list[Load]
    evaluation: dict[str, list[Load]]
    others: list[Load]
    unread: dict[str, ast.expr]


def read_trainer_data(tree: ast.Module, trainers: Mapping[str, str], trace: Callable[[ast.expr], str]) -> TrainerData:
    """Follow the data sets of the first trainer to the calls that load them.

    Args:
        trainers: Names of the classes of trainers.
        trace: Returns the name under which a function is defined, with dots.
    """
    script = _Script(tree, trace)
    loads = [script.load(call) for scope in script.scopes for call in scope.calls if script.name(call) in LOADING]
    calls = [(call, scope) for scope in script.scopes for call in scope.calls if script.name(call) in trainers]
    train, evaluation, unread = list[Load](), dict[str, list[Load]](), dict[str, ast.expr]()
    for call, scope in calls[:1]:
        context = _Context(scope, call.lineno + 1)
        arguments = _list_arguments(call, script.name(call))
        if (value := arguments.get("train_dataset")) is not None:
            train = script.follow(value, context)
            unread |= {} if train else {"train_dataset": value}
        if (value := arguments.get("eval_dataset")) is not None and ast.unparse(value) != "None":
            evaluation = script.follow_named(value, context)
            unread |= {} if any(evaluation.values()) else {"eval_dataset": value}
    used = {load.call for load in (*train, *(load for several in evaluation.values() for load in several))}
    return TrainerData(train, evaluation, [load for load in loads if load.call not in used], unread)


def _list_arguments(call: ast.Call, name: str) -> dict[str, ast.expr]:
    start = _PLACES.get(name, len(call.args))
    arguments = dict(zip(("train_dataset", "eval_dataset"), call.args[start:], strict=False))
    return arguments | {word.arg: word.value for word in call.keywords if word.arg}


@dataclass(frozen=True)
class _Assignment:
    """``value``, or its item ``item``, gets the name ``name``. It is unsure where a condition or a loop decides it."""

    name: str
    value: ast.expr
    item: int | None
    line: int
    is_unsure: bool


@dataclass(eq=False)
class _Scope:
    """What a function, or the module where ``function`` is None, does by itself."""

    function: ast.FunctionDef | ast.AsyncFunctionDef | None
    assignments: list[_Assignment] = field(default_factory=list[_Assignment])
    calls: list[ast.Call] = field(default_factory=list[ast.Call])
    returns: list[ast.expr] = field(default_factory=list[ast.expr])


@dataclass(frozen=True)
class _Context:
    """Where an expression is read: before a line of a scope, whose parameters have values."""

    scope: _Scope
    line: int
    values: Mapping[str, "tuple[ast.expr, _Context]"] = field(default_factory=dict[str, "tuple[ast.expr, _Context]"])
    depth: int = 0

    def before(self, line: int) -> "_Context":
        return replace(self, line=line, depth=self.depth + 1)


class _Script:
    """The scopes of a script, and what its expressions load."""

    def __init__(self, tree: ast.Module, trace: Callable[[ast.expr], str]) -> None:
        self._trace, self._count = trace, 0
        self._module = _Scope(None)
        self.scopes = [self._module]
        self._visit(tree, self._module, is_unsure=False)
        self._functions = {scope.function.name: scope for scope in self.scopes if scope.function is not None}

    def name(self, call: ast.Call) -> str:
        """Return the name of what is called, without the module."""
        return self._trace(call.func).rpartition(".")[2]

    def load(self, call: ast.Call, context: "_Context | None" = None) -> Load:
        """Return what a call loads, with the constants that its arguments have in ``context``."""
        names = ("path", "name", "data_dir", "data_files", "split")
        words = dict(zip(names if self.name(call) == "load_dataset" else ("dataset_path",), call.args, strict=False))
        words |= {word.arg: word.value for word in call.keywords if word.arg}
        if context is not None:
            words = {name: self._settle(value, context) for name, value in words.items()}
        split = words.get("split")
        return Load(call, words, None if split is None or ast.unparse(split) == "None" else split)

    def _visit(self, parent: ast.AST, scope: _Scope, *, is_unsure: bool) -> None:
        for node in ast.iter_child_nodes(parent):
            inner = scope
            if isinstance(node, _FUNCTIONS):
                self.scopes.append(inner := _Scope(node))
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                scope.assignments += _list_assignments(targets, node.value, node.lineno, is_unsure)
            elif isinstance(node, ast.Call):
                scope.calls.append(node)
            elif isinstance(node, ast.Return) and node.value is not None:
                scope.returns.append(node.value)
            decides = isinstance(node, _UNSURE) and "__name__" not in ast.unparse(getattr(node, "test", node))
            self._visit(node, inner, is_unsure=inner is scope and (is_unsure or decides))

    def follow_named(self, node: ast.expr, context: _Context) -> dict[str, list[Load]]:
        """Return what an expression loads, by the names of a mapping that it is, or by the name ""."""
        literal, where = self._find_literal(node, context)
        if isinstance(literal, ast.Dict) and all(isinstance(key, ast.Constant) for key in literal.keys):
            names = [str(getattr(key, "value", "")) for key in literal.keys]
            return {name: self.follow(value, where) for name, value in zip(names, literal.values, strict=True)}
        return {"": self.follow(node, context)}

    def follow(self, node: ast.AST | None, context: _Context, item: ast.expr | None = None) -> list[Load]:
        """Return what an expression loads, or the item of this name or number. Of several values that a condition
        chooses from, all count."""
        self._count += 1
        is_endless = context.depth > _DEEPEST or self._count > _MOST  # as in a function that calls itself
        loads = list[Load]() if is_endless else self._follow(node, context, item)
        return list({load.key: load for load in loads}.values())

    def _follow(self, node: ast.AST | None, context: _Context, item: ast.expr | None) -> list[Load]:
        deeper = context.before(context.line)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._follow_name(node, context, item)
        if isinstance(node, ast.Call):
            return self._follow_call(node, context, item)
        if isinstance(node, ast.Subscript):
            return _take(self.follow(node.value, deeper, self._settle(node.slice, deeper)), item)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self.follow(node.value, deeper, item)
        if isinstance(node, ast.Dict | ast.List | ast.Tuple):
            values = _choose_item(node, item)
        elif isinstance(node, ast.IfExp):
            values = [node.body, node.orelse]
        else:
            values = node.values if isinstance(node, ast.BoolOp) else []
            return [load for value in values for load in self.follow(value, deeper, item)]
        inner = None if isinstance(node, ast.Dict | ast.List | ast.Tuple) else item
        return [load for value in values for load in self.follow(value, deeper, inner)]

    def _follow_name(self, node: ast.Name | ast.Attribute, context: _Context, item: ast.expr | None) -> list[Load]:
        name = ast.unparse(node)
        for scope, line in ((context.scope, context.line), (self._module, _LAST)):
            loads = list[Load]()
            earlier = [entry for entry in scope.assignments if entry.name == name and entry.line < line]
            where = context if scope is context.scope else _Context(scope, line, depth=context.depth)
            for entry in reversed(earlier):
                part = item if entry.item is None else ast.Constant(entry.item)
                of_entry = self.follow(entry.value, where.before(entry.line), part)
                loads += of_entry if entry.item is None else _take(of_entry, item)
                if not entry.is_unsure:
                    break
            if earlier:
                return loads
            if scope is context.scope and name in self._parameters(scope):
                return self._follow_parameter(name, context, item)
            if isinstance(node, ast.Attribute) and scope is self._module:  # such as self.rows, of another method
                entries = [(entry, other) for other in self.scopes for entry in other.assignments if entry.name == name]
                contexts = [_Context(other, entry.line, depth=context.depth + 1) for entry, other in entries]
                pairs = zip(entries, contexts, strict=True)
                return [load for (entry, _), where in pairs for load in self.follow(entry.value, where, item)]
        return []

    def _follow_parameter(self, name: str, context: _Context, item: ast.expr | None) -> list[Load]:
        if name in context.values:
            value, where = context.values[name]
            return self.follow(value, where.before(where.line), item)
        function, loads = context.scope.function, list[Load]()
        for scope in self.scopes:
            for call in scope.calls if function is not None else ():
                if isinstance(call.func, ast.Name) and function is not None and call.func.id == function.name:
                    where = _Context(scope, call.lineno + 1, depth=context.depth + 1)
                    value = self._bind(call, context.scope, where).get(name)
                    loads += self.follow(value[0], where, item) if value else []
        return loads

    def _follow_call(self, call: ast.Call, context: _Context, item: ast.expr | None) -> list[Load]:
        name = self.name(call)
        if name in LOADING:
            return _take([self.load(call, context)], item)
        deeper = context.before(context.line)
        if isinstance(call.func, ast.Name) and name in self._functions:
            scope = self._functions[name]
            inner = _Context(scope, _LAST, self._bind(call, scope, context), context.depth + 1)
            return [load for value in scope.returns for load in self.follow(value, inner, item)]
        if name == "DatasetDict" and call.args:
            return self.follow(call.args[0], deeper, item)
        if isinstance(call.func, ast.Attribute) and name not in _COMBINING:
            if name == "train_test_split":
                return [replace(load, is_share=True) for load in self.follow(call.func.value, deeper)]
            return self.follow(call.func.value, deeper, item)  # map and others keep the splits of a mapping
        arguments = [*call.args, *(word.value for word in call.keywords)]
        loads = [load for value in arguments for load in self.follow(value, deeper)]
        return _take([replace(load, is_joined=True) for load in loads] if name in _COMBINING else loads, item)

    def _settle(self, node: ast.expr, context: _Context) -> ast.expr:
        """The constant that a name stands for; the expression itself where it stands for none."""
        literal, where = self._find_literal(node, context)
        if isinstance(literal, ast.Name) and where.depth <= _DEEPEST:
            if literal.id in where.values:
                value, caller = where.values[literal.id]
                return self._settle(value, replace(caller, depth=where.depth + 1))
            literal = _list_defaults(where.scope.function).get(literal.id, literal)
        return literal if isinstance(literal, ast.Constant) else node

    def _bind(self, call: ast.Call, scope: _Scope, context: _Context) -> dict[str, tuple[ast.expr, _Context]]:
        """The arguments of a call by the names of the parameters."""
        pairs = [*zip(self._parameters(scope), call.args, strict=False)]
        pairs += [(word.arg, word.value) for word in call.keywords if word.arg]
        return {name: (value, context) for name, value in pairs}

    def _parameters(self, scope: _Scope) -> Sequence[str]:
        if scope.function is None:
            return []
        arguments = scope.function.args
        return [part.arg for part in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def _find_literal(self, node: ast.expr, context: _Context) -> tuple[ast.expr, _Context]:
        """The expression that a name stands for, and where it is read."""
        while isinstance(node, ast.Name) and context.depth <= _DEEPEST:
            name = node.id
            earlier = [entry for entry in context.scope.assignments if entry.name == name and entry.line < context.line]
            if not earlier or earlier[-1].item is not None:
                break
            node, context = earlier[-1].value, context.before(earlier[-1].line)
        return node, context


def _list_assignments(
    targets: Sequence[ast.expr], value: ast.expr, line: int, is_unsure: bool
) -> Iterator[_Assignment]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            for number, part in enumerate(target.elts):
                yield _Assignment(ast.unparse(part), value, number, line, is_unsure)
        else:
            yield _Assignment(ast.unparse(target), value, None, line, is_unsure)


def _list_defaults(function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> dict[str, ast.expr]:
    """The defaults of the parameters of a function."""
    if function is None:
        return {}
    arguments = function.args
    positional = [part.arg for part in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return defaults | {part.arg: value for part, value in pairs if value is not None}


def _choose_item(node: ast.Dict | ast.List | ast.Tuple, item: ast.expr | None) -> Sequence[ast.expr]:
    """The item of a mapping or a list, or all of them where ``item`` does not say which."""
    key = item.value if isinstance(item, ast.Constant) else None
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [value for name, value in pairs if key is None or getattr(name, "value", None) == key]
    return [node.elts[key]] if isinstance(key, int) and key < len(node.elts) else node.elts


def _take(loads: Sequence[Load], item: ast.expr | None) -> list[Load]:
    return [load if item is None else load.take(item) for load in loads]


# -- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSettings:
    """The settings that the data sets of a script are, those that it does not decide, and what else it does."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    undecided: list[str] = field(default_factory=list[str])
    changes: list[ScriptChange] = field(default_factory=list[ScriptChange])


@dataclass(frozen=True)
class _Source:
    """The paths of the data sets of an argument, which have one configuration and one split."""

    paths: Any
    name: Any
    split: Any

    def has_rows_of(self, other: "_Source") -> bool:
        """Whether both are slices of one split of one data set, such as train[:90%] and train[90%:]."""
        mine, theirs = (str(source.split or "train").partition("[")[0] for source in (self, other))
        is_decided = self.paths is not None and UNDECIDED not in (self.paths, self.split)
        return is_decided and (self.paths, self.name, mine) == (other.paths, other.name, theirs)


def list_data_settings(data: TrainerData, evaluate: Callable[[ast.expr], Any], *, is_named: bool) -> DataSettings:
    """Return the settings that the data sets of a trainer are.

    Args:
        evaluate: Returns the value of an expression, or UNDECIDED.
        is_named: Whether a setting names the training data already.
    """
    settings = DataSettings()
    decided = [load for load in data.others if _read_source([load], evaluate).paths != UNDECIDED]
    first = (decided or data.others)[:1]  # of a script that gives its trainer what is not followed to a call
    loads = data.train or first
    train = _read_source(loads, evaluate)
    if not is_named:
        _add(settings, {"dataset_name": train.paths, "dataset_config": train.name, "dataset_train_split": train.split})
    for name, value in data.unread.items():
        settings.changes.append(ScriptChange(f"{name} (line {value.lineno})", _UNREAD[name]))
    _add_evaluation(settings, data, loads, train, evaluate)
    for load in data.others:
        if data.train or is_named or load is not first[0]:
            settings.changes.append(ScriptChange(f"{_name(load.call)} (line {load.call.lineno})", _UNUSED))
    return settings


def _add_evaluation(
    settings: DataSettings, data: TrainerData, loads: list[Load], train: _Source, evaluate: Callable[[ast.expr], Any]
) -> None:
    first: _Source | None = None
    for name, several in data.evaluation.items():
        source, calls = _read_source(several, evaluate), {load.call for load in several}
        subject = f"eval_dataset{f'[{name!r}]' if name else ''}"
        of_training = not calls.isdisjoint(load.call for load in loads)
        if (of_training and any(load.is_share for load in several)) or source.has_rows_of(train):
            settings.changes.append(ScriptChange(f"{subject} (line {several[0].call.lineno})", _SHARE))
        elif name and _differs(source, first):
            settings.changes.append(ScriptChange(subject, _OTHER_SET))
        elif several:
            first = source
            of_set = {"eval_dataset_config": source.name, "dataset_test_split": source.split}
            if of_training and source.paths == UNDECIDED:  # as the name of the training data is already
                of_set = {"dataset_test_split": source.split}
            elif source.paths == UNDECIDED:
                of_set["eval_dataset"] = UNDECIDED
            else:
                of_set["eval_dataset"] = _add_set(settings.values.get("eval_dataset"), name, source.paths)
            _add(settings, of_set)


def _differs(source: _Source, first: _Source | None) -> bool:
    """Whether a set with a name cannot be one of data.eval beside the first one."""
    if not isinstance(source.paths, str) or source.paths == UNDECIDED:
        return True
    return first is not None and (source.name, source.split) != (first.name, first.split)


def _add_set(sets: Any, name: str, paths: Any) -> Any:
    return {**(sets or {}), name: paths} if name else paths


def _read_source(loads: Sequence[Load], evaluate: Callable[[ast.expr], Any]) -> _Source:
    """The data sets that are loaded; UNDECIDED stands for what the script does not decide.

    Several data sets that are joined have a list of paths. Where a condition chooses one of several, none is decided.
    """
    sources = list[_Source]()
    for load in loads:
        parts = {name: evaluate(node) for name, node in load.arguments.items()}
        sources.append(_Source(parts.get("path"), parts.get("name"), parts.get("split")))
    if len(sources) < 2:
        return sources[0] if sources else _Source(None, None, None)
    paths = [source.paths for source in sources]
    alike = len({(str(source.name), str(source.split)) for source in sources}) == 1
    joined = all(load.is_joined for load in loads) and all(isinstance(path, str) for path in paths)
    if not alike or not joined or UNDECIDED in paths or len({*paths}) < len(paths):
        return _Source(UNDECIDED, None, None)
    return _Source(paths, sources[0].name, sources[0].split)


def _add(settings: DataSettings, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value == UNDECIDED:
            settings.undecided.append(name)
        elif value is not None:
            settings.values[name] = value


def _name(call: ast.Call) -> str:
    first = ast.unparse(call.args[0]) if call.args else "..."
    return f"{ast.unparse(call.func).rpartition('.')[2]}({first})"


_UNUSED: Final = (
    "the script loads this data set, and it is neither data.train nor data.eval above, because it does not reach the "
    "trainer by names that are followed: set them where it belongs to the training"
)
_UNREAD: Final = {
    "train_dataset": "the rows that the script trains on are not followed to a data set that it loads: data.train is "
    "the first one that it loads besides, or is not set; set it to those rows",
    "eval_dataset": "the rows that the script evaluates on are not followed to a data set that it loads: set data.eval "
    "to them, or data.holdout to a share of data.train",
}
_SHARE: Final = (
    "the script evaluates on rows that it takes from the training data: data.holdout is the share that is held out "
    "where data.eval is not set, and another choice of rows needs a file of its own as data.eval"
)
_OTHER_SET: Final = (
    "this set has another split or configuration than the sets before it, or is not followed to one data set that the "
    "script loads: data.eval takes sets of one split, data.eval_split; write the rows to a file by their method "
    "to_json, and name that file in data.eval"
)
