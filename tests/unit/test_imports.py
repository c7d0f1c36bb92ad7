"""Circles of imports: none at run time, which import-linter checks, and few that only types close.

Lists of names stand where users look for them."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_three_imports_for_types_close_a_circle() -> None:
    whole = grimp.build_graph("podium", cache_dir=None)
    at_run_time = grimp.build_graph("podium", exclude_type_checking_imports=True, cache_dir=None)
    closing = [
        (importer, imported)
        for importer in sorted(whole.modules)
        for imported in sorted(whole.find_modules_directly_imported_by(importer))
        if not at_run_time.direct_import_exists(importer=importer, imported=imported)
        and whole.find_shortest_chain(importer=imported, imported=importer) is not None
    ]
    assert closing == [
        ("podium.backends.local.process", "podium.backends.local.backend"),
        ("podium.runtime.endpoints", "podium.runtime.group"),
        ("podium.runtime.worker", "podium.runtime.group"),
    ]


def test_only_packages_and_modules_for_users_list_their_names() -> None:
    pages = [(ROOT / page).read_text() for page in ("docs/versioning.md", "docs/reference/write.py")]
    for_users = {name for page in pages for name in re.findall(r"[`\"](podium[\w.]*)[`\"]", page)}
    source = ROOT / "src" / "podium"
    listing = [
        ".".join(("podium", *path.relative_to(source).with_suffix("").parts))
        for path in sorted(source.rglob("*.py"))
        if path.name != "__init__.py" and "\n__all__" in path.read_text()
    ]
    assert [name for name in listing if name not in for_users] == []
