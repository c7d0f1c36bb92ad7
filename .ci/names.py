"""Count the names in src/ and in plugins/*/src that say nothing of the thing, and fail above a limit.

    python .ci/names.py [--list]

A variable is named by the noun of the thing, and a function begins with its verb. Counted are assignments to words that
stand for anything (``found``, ``own``, …), and functions other than properties that begin with a participle
(``_told``). Terms of the field that are participles (``padded``) count too, so the limit is not zero.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

VAGUE_WORDS = "found own one place given asked whole drawn held told said there known each here"
IRREGULAR_WORDS = """
told said given held drawn kept made found shown sent left lost taken written begun broken built caught chosen done gone
grown heard hidden known laid led meant met paid seen sold shut sought spent stood stuck struck taught thought thrown
torn understood woken worn bound brought bought
"""
VAGUE = frozenset(VAGUE_WORDS.split())
IRREGULAR = frozenset(IRREGULAR_WORDS.split())
MOST_VAGUE_PER_1000 = 5.0
MOST_PARTICIPLES_PERCENT = 2.0
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"})


def find_vague_assignments(tree: ast.Module) -> tuple[list[ast.Name], int]:
    """Return the assignments to vague names, and the number of all assignments to names."""
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [node for node in stores if node.id in VAGUE], len(stores)


def find_participles(tree: ast.Module) -> tuple[list[ast.FunctionDef | ast.AsyncFunctionDef], int]:
    """Return the functions that begin with a participle, and the number of all functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node for node in functions if begins_with_participle(node.name) and not is_property(node)], len(functions)


def begins_with_participle(name: str) -> bool:
    """Whether the first word of a function's name is a participle."""
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in VERBS_IN_ED)


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as an attribute, whose name is a noun or an adjective."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def read_modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted([*(root / "src").rglob("*.py"), *root.glob("plugins/*/src/**/*.py")]):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def main(root: Path, *, lists: bool) -> int:
    """Print both figures, and return 1 if one is above its limit."""
    vague: list[str] = []
    participles: list[str] = []
    assignments = functions = 0
    for path, tree in read_modules(root):
        names, count = find_vague_assignments(tree)
        vague += [f"{path}:{name.lineno} {name.id}" for name in names]
        assignments += count
        defined, count = find_participles(tree)
        participles += [f"{path}:{function.lineno} {function.name}" for function in defined]
        functions += count
    per_1000, percent = 1000 * len(vague) / max(1, assignments), 100 * len(participles) / max(1, functions)
    print(f"names: {per_1000:.1f} of 1,000 assignments are to a vague name (at most {MOST_VAGUE_PER_1000:g})")
    print(f"names: {percent:.1f} % of the functions begin with a participle (at most {MOST_PARTICIPLES_PERCENT:g} %)")
    failed = per_1000 > MOST_VAGUE_PER_1000 or percent > MOST_PARTICIPLES_PERCENT
    if failed or lists:
        print(*vague, *participles, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], lists="--list" in sys.argv[1:]))
