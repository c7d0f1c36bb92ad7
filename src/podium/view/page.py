"""The page: one HTML file with its styles and scripts inside, whoever delivers it.

The scripts are ES modules in ``page/``, which import from one another. In the page they stand one after the other in
one module, without their import and export words, so that the page also opens from a disk, where no module loads.
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
        title: What the browser's tab says.
        answers: The packed answers that the page finds within itself; "" where it asks a server for them.
        note: What an exported page says of itself.
    """
    folder = files("podium.view") / "page"
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
    """JSON that cannot end the script element which holds it."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
