"""The page: one HTML file that contains its styles and scripts, both from the server and exported.

The scripts are ES modules in ``page/``, which import from one another. In the page they are joined to one module,
without their import and export words, because a page that is opened from a disk cannot load modules. So all their names
share one scope.
A content security policy names the hashes of what may run, and forbids every request that leaves the page's own origin.
"""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any, Final

__all__ = ["page"]

_SCRIPTS: Final = (
    "dom",
    "scales",
    "source",
    "curves",
    "tokens",
    "completions",
    "evaluations",
    "waits",
    "timeline",
    "failures",
    "settings",
    "main",
)
_IMPORT: Final = re.compile(r'^import [^;]*? from "\./\w+\.js";\n', re.MULTILINE)
_NONE, _SELF = "'none'", "'self'"
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|const|class|let)\b)", re.MULTILINE)


def page(title: str, answers: str = "", note: str = "") -> str:
    """Return the page.

    Args:
        title: Title of the browser's tab.
        answers: Compressed answers, for an exported page. "" means that the page asks a server.
        note: Note on an exported page about what it leaves out.
    """
    folder = files("podium_view") / "page"
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", (folder / f"{name}.js").read_text())) for name in _SCRIPTS)
    style = (folder / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {_NONE if answers else _SELF}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": _escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _json({"answers": answers, "note": note}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (folder / "index.html").read_text())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape(text: str) -> str:
    return "".join(f"&#{ord(c)};" if c in "<>&\"'" or ord(c) < 32 else c for c in text)


def _json(value: Any) -> str:
    """Return JSON that cannot end the script element that contains it."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
