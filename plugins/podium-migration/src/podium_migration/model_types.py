"""The type of a model, and the layers that peft adapts in models of this type where a script names none."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from podium.installed import has_library

_FAMILIES: Final = {
    "qwen2": re.compile(r"qwen-?2(\.5)?(?![.\d])"),
    "qwen3": re.compile(r"qwen-?3(?![.\d])"),
    "llama": re.compile(r"llama"),
    "mistral": re.compile(r"mistral"),
}
_OTHER_KINDS: Final = re.compile(
    r"-a\d+(\.\d+)?b|moe|mixtral|vl\b|omni|audio|vision|next|llama-?4|mistral-small-3|pixtral"
)
"""Models of these families whose type is another one, such as ``qwen3_moe``."""


def find_model_type(name: str) -> tuple[str, str]:
    """Return a model's type, such as "qwen3", and whence it is known. Both are empty where it is not.

    Its ``config.json`` says it, in a directory or in the hub's files on this machine, or else the model's name does for
    families whose types follow from names. Nothing is downloaded.
    """
    for path in (Path(name) / "config.json", _find_cached(name)):
        if path is not None and path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(content, dict) and isinstance(content.get("model_type"), str):
                return content["model_type"], "its config.json"
    words = name.lower()
    types = [kind for kind, expression in _FAMILIES.items() if expression.search(words)]
    return (types[0], "its name") if len(types) == 1 and not _OTHER_KINDS.search(words) else ("", "")


def read_peft_targets(model_type: str) -> Any:
    """Return the names of the layers that the installed peft adapts by default in models of a type.

    It is a pattern for some types. None where peft has none, or cannot be read. The package is not imported.
    """
    spec = find_spec("peft") if has_library("peft") else None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    for path in (Path(folder) / "utils" / "constants.py" for folder in folders):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
                return _read_entry(node.value, model_type)
    return None


_TABLE: Final = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def _read_entry(table: ast.expr, name: str) -> Any:
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == name:
            try:
                return ast.literal_eval(value)
            except ValueError:
                return None
    return None


def _find_cached(name: str) -> Path | None:
    """The ``config.json`` of a model of the hub that was downloaded before."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or not has_library("huggingface_hub"):
        return None
    from huggingface_hub import try_to_load_from_cache  # no other conversion needs it
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
