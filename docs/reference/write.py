"""Writes the pages of the reference from the code: `python docs/reference/write.py`. A test says when they are old.

The first page lists all public names. A page of names has a line for each public name of some modules, which
mkdocstrings replaces by its docstring. The page of keys has every configuration key. The page of packages has every
package in plugins/. The tables of defaults on the pages "coming from" are those of podium_migration.
"""

import importlib
import inspect
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.config import build_config
from podium.runs.config import PPOConfig
from podium.runs.recipes import find_recipe, list_recipes
from podium.trainer import keys_of
from podium_migration.tables import Equivalent, Table, read_tables

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """A page ``file`` with the public names of ``modules``, of which each has a heading if there are several."""

    file: str
    title: str
    modules: tuple[str, ...]


PAGES = (
    Page("podium.md", "podium", ("podium",)),
    Page("trainer.md", "Training", ("podium.trainer",)),
    Page("workers.md", "Models in workers", ("podium.workers", "podium.models", "podium.training")),
    Page("algorithms.md", "Algorithms", ("podium.algorithms", "podium_algorithms")),
    Page("rewards.md", "Rewards", ("podium.rewards",)),
    Page("rollout.md", "Rollout", ("podium.rollout.sampling", "podium.rollout.tasks", "podium.rollout.engines")),
    Page("data.md", "Data", ("podium.data",)),
    Page("runtime.md", "Runtime", ("podium.runtime",)),
    Page("backend.md", "Contract of backends", ("podium.runtime.backend", "podium.runtime.messages")),
    Page("telemetry.md", "Telemetry", ("podium.telemetry", "podium.telemetry.events", "podium.telemetry.sinks")),
    Page("errors.md", "Errors", ("podium.errors",)),
    Page("dryrun.md", "Dry runs", ("podium_dryrun",)),
    Page("inference.md", "Models in use", ("podium_inference",)),
    Page("preferences.md", "Preferences", ("podium_preferences",)),
    Page("agents.md", "Agents", ("podium_agents",)),
    Page("testing.md", "Contract suites", ("podium_testing",)),
)


def names_of(module: str) -> list[str]:
    """The public classes, functions and types of a module, in alphabetical order, but for those that another page has:
    names of ``podium``, and those of the contract of backends."""
    found = importlib.import_module(module)
    public = [name for name in dict.fromkeys(found.__all__) if not inspect.ismodule(getattr(found, name))]
    return sorted(name for name in public if _home(name, getattr(found, name), module) == module)


def _home(name: str, value: object, module: str) -> str:
    """The first of the modules that document names of others which has this value under this name, or ``module``."""
    for first in ("podium", "podium.runtime.backend", "podium.runtime.messages"):
        home = importlib.import_module(first)
        if name in home.__all__ and getattr(home, name) is value:
            return first
    return module


def page_of(page: Page) -> str:
    """The text of a page of names."""
    lines = [f"# {page.title}", "", "<!-- python docs/reference/write.py writes this page -->"]
    for module in page.modules:
        said = inspect.getdoc(importlib.import_module(module)) or ""
        if len(page.modules) > 1:
            lines += ["", f"## {module}"]
        lines += ["", said.partition("\n")[0]]
        for name in names_of(module):
            lines += ["", f"::: {module}.{name}"]
    return "\n".join(lines) + "\n"


def index_page() -> str:
    """The text of the first page: every public name of each page of names, with a link to it."""
    lines = ["# Reference", "", "<!-- python docs/reference/write.py writes this page -->", ""]
    lines += [
        "All public names, by the page that describes them. [Configuration keys](keys.md) have a page of their own."
    ]
    for page in PAGES:
        lines += ["", f"## [{page.title}]({page.file})"]
        for module in page.modules:
            links = [f"[`{name}`]({page.file}#{module}.{name})" for name in names_of(module)]
            lines += ["", f"`{module}`: {', '.join(links)}"]
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """The text of the page of configuration keys."""
    lines = ["# Configuration keys", "", "<!-- python docs/reference/write.py writes this page -->", ""]
    lines += [
        "`podium train RECIPE --keys` prints the same. Recipes have their own defaults, and some have fewer keys."
    ]
    recipes = {recipe: keys_of(find_recipe(recipe).config) for recipe in list_recipes()}
    defaults = {name: {key.path: key.default for key in keys} for name, keys in recipes.items()}
    every = {key.path: key for keys in reversed(recipes.values()) for key in keys}
    order = dict.fromkeys(key.path for keys in recipes.values() for key in keys)
    sections = dict.fromkeys(path.rpartition(".")[0] for path in order)
    for section in sections:
        lines += ["", f"## {section}", "", "| key | default | takes | meaning |", "|---|---|---|---|"]
        for path in order:
            above, _, name = path.rpartition(".")
            if above == section:
                known = {recipe: own[path] for recipe, own in defaults.items() if path in own}
                docs = {
                    key.doc: recipe for recipe, keys in reversed(recipes.items()) for key in keys if key.path == path
                }
                first, *others = reversed(docs)  # a key may mean another thing in another recipe
                doc = " ".join([first, *(f"Of {docs[other]}: {other}" for other in others)])
                expects, meaning = (text.replace("|", "\\|") for text in (every[path].expects, doc))
                lines.append(f"| `{name}` | {_shown(known, len(recipes))} | {expects} | {meaning} |")
    return "\n".join(lines) + "\n"


def _shown(defaults: dict[str, Any], recipes: int) -> str:
    """The defaults of a key by recipe: once if all have the same, or with the recipes that have each."""
    texts = {recipe: f"`{_as_typed(value)}`" if value != "" else "empty" for recipe, value in defaults.items()}
    if len(texts) == recipes and len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return ", ".join(
        f"{text} ({', '.join(recipe for recipe, own in texts.items() if own == text)})"
        for text in dict.fromkeys(texts.values())
    )


def _as_typed(value: Any) -> str:
    """A value as one writes it in YAML or behind an option."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def pages() -> dict[Path, str]:
    """The text of every page that is written here, as a whole or in part, by its file."""
    texts = {page.file: page_of(page) for page in PAGES}
    texts |= {"index.md": index_page(), "keys.md": keys_page(), "packages.md": packages_page()}
    return {HERE / file: text for file, text in texts.items()} | {path: fill_page(path) for path in _with_defaults()}


# -- packages in plugins/ --------------------------------------------------------------------------------------------

_PACKAGES = """# Packages

Podium itself has the trainers, the workers, the backends `inline` and `local`, the engine `transformers`,
and rewards. Each package below is one of its own, in
[plugins/](https://github.com/podium-rl/podium/tree/main/plugins). Podium finds its names through Python's entry points,
by the door that is open to a package of yours, too. Neither Podium nor these packages are on a package index yet:
install those that you use together with Podium, in the clone, such as
`pip install . ./plugins/podium-view './plugins/podium-rewards[math]'`.

| package | what it adds | its names, by the group of entry points | extras |
|---|---|---|---|
"""


def packages_page() -> str:
    """A row for each package in plugins/, from its pyproject.toml."""
    lines = list[str]()
    for file in sorted((HERE.parents[1] / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        name, groups = project["name"], project.get("entry-points", {})
        names = "; ".join(
            f"{', '.join(f'`{entry}`' for entry in entries)} of `{group}`" for group, entries in groups.items()
        )
        extras = ", ".join(f"`{extra}`" for extra in project.get("optional-dependencies", {}))
        page = f"https://github.com/podium-rl/podium/tree/main/plugins/{name}"
        lines.append(f"| [{name}]({page}) | {project['description']} | {names} | {extras} |")
    return _PACKAGES + "\n".join(lines) + "\n"


# -- defaults of other projects --------------------------------------------------------------------------------------

_BLOCK = re.compile(r"(<!-- defaults of (\S+): python docs/reference/write.py writes this table -->\n\n)(?:\|.*\n)*\n?")
_LEARNS = (
    "optim.",
    "algorithm.",
    "batch.",
    "critic.lr",
    "sampling.",
    "data.max_prompt_tokens",
    "data.overlong",
    "eval.",
    "run.epochs",
    "save.keep",
)
"""Keys whose defaults change what is learned or how it is judged. The rest is about speed and places."""
_RECIPES = {"grpo": ("grpo",), "sft": ("sft",), "dpo": ("dpo",), "reward": ("rm",), "rm": ("rm",)}


def _with_defaults() -> list[Path]:
    return [path for path in sorted(HERE.parent.glob("coming-from-*.md")) if _BLOCK.search(path.read_text())]


def fill_page(path: Path) -> str:
    """The text of a page, with its tables of defaults made anew."""
    tables = {table.project: table for table in read_tables()}
    text = _BLOCK.sub(lambda match: f"{match[1]}{defaults_table(tables[match[2]])}\n\n", path.read_text())
    return text.rstrip("\n") + "\n"


def defaults_table(table: Table) -> str:
    """A row for each setting of a project whose default changes what is learned, and means something else here."""
    ours = {recipe: {key.path: key.default for key in keys_of(find_recipe(recipe).config)} for recipe in list_recipes()}
    for recipe in ("grpo", "ppo"):
        config = build_config(find_recipe(recipe).config, {"model": {"path": "MODEL"}})
        assert isinstance(config, PPOConfig)
        resolved = config.resolved_algorithm
        names = ("clip_low", "clip_high", "aggregation", "normalize_advantage")
        ours[recipe] |= {f"algorithm.{name}": getattr(resolved, name) for name in names}
    names_of_rows = list[str]()
    lines = [f"| {table.project} | default | here | default | what differs |", "|---|---|---|---|---|"]
    for name, answer in table.answers.items():
        theirs = answer.default if isinstance(answer.default, dict) and answer.default else {"": answer.default}
        learns = answer.key.startswith(_LEARNS) and (".options." not in answer.key or answer.group == "dual_clip")
        shorter = any(line.endswith(f".{name}") and table.answers[line].key == answer.key for line in names_of_rows)
        if (
            learns
            and not shorter
            and answer.group != "same"
            and answer.rule != "betas"
            and any(_differs(answer, theirs[own], own, ours) for own in theirs)
        ):
            known = {recipe: keys[answer.key] for recipe, keys in ours.items() if answer.key in keys}
            here = _shown(known, len(known)) if known else "off"
            texts = (f"`{_as_typed(value)}`" + (f" ({own})" if own else "") for own, value in theirs.items())
            names_of_rows.append(name)
            lines.append(f"| `{name}` | {', '.join(texts)} | `{answer.key}` | {here} | {_remark(answer, theirs)} |")
    return "\n".join(lines)


def _remark(answer: Equivalent, theirs: dict[str, Any]) -> str:
    """What differs, without what the columns say."""
    parts = [
        part for value in theirs.values() if (translation := answer.translate(value)) for part in [translation.remark]
    ]
    parts += answer.remark.split("; ")
    kept = dict.fromkeys(part for part in parts if part and not re.fullmatch(r"[^,;:]* by default", part))
    return "; ".join(kept).replace("|", "\\|")


def _differs(answer: Equivalent, default: Any, own: str, ours: dict[str, dict[str, Any]]) -> bool:
    """Whether a default of another project's recipe means something else than Podium's."""
    translation = answer.translate(default)
    if default in (None, "null") or (translation is not None and translation.missing):
        return default not in (None, "null")
    value = default if translation is None else translation.value
    recipes = [recipe for recipe in _RECIPES.get(own, ("grpo", "ppo")) if answer.key in ours[recipe]]
    return (not recipes and own not in _RECIPES) or any(
        _as_typed(value) != _as_typed(ours[recipe][answer.key]) and value != ours[recipe][answer.key]
        for recipe in recipes
    )


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
