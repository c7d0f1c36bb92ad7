"""Circles of imports: none at run time, which import-linter checks, and few that only types close."""

from __future__ import annotations

import grimp


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
