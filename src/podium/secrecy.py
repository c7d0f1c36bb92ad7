"""What looks like a secret, by its name or by itself, and what is shown in its place.

A secret of the configuration goes to the worker that needs it, and nowhere else: files of a run, trackers, pages,
reports, the log and errors show ``MASK``. The module imports nothing of Podium.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, cast

__all__ = ["MASK", "find_masked", "find_secrets", "is_secret", "mask", "mask_command", "mask_text", "variable_of"]

MASK: Final = "<secret>"

_WORDS: Final = r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|WEBHOOK|NETRC|DSN"
_VARIABLE: Final = re.compile(
    rf"({_WORDS}|TOKEN|KEY|AUTH)S?(_|$)|_(PASS|PWD|PAT)$|^(AWS_|PAT$)", re.IGNORECASE
)  # of environments, where hardly another variable is called so
_KEY: Final = re.compile(
    rf"(^|_)(({_WORDS})S?(_URL|_VALUE)?|AUTH|AUTHORIZATION|BEARER|PASS|PWD|PAT|TOKEN"
    r"|(API|ACCESS|PRIVATE|SECRET|AUTH|SIGNING|ENCRYPTION|ACCOUNT|SERVICE|SESSION|LICENSE|MASTER|ADMIN)_?KEYS?)$"
)  # of options, where a key may also be that of a mapping
_NO_KEY: Final = re.compile(
    r"(^|_)(STOP|PAD|PADDING|EOS|BOS|UNK|MASK|SEP|CLS|SPECIAL|END|START|BEGIN|FIRST|LAST|THINK\w*|IMAGE|VIDEO|AUDIO)_TOKEN$"
)
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # between the words of apiKey
# What may stand at each place of a long text is bounded, so that the search takes a time proportional to its length.
_SIGN: Final = re.compile(
    r"(?P<head>[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@'\"]*:)[^/\s@'\"]+(?=@)"  # the password of a URL
    r"|(?P<scheme>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{12,}"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|sk_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|wandb_v1_[A-Za-z0-9_]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
    r"|(?P<hook>https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s'\"]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_SHORTEST: Final = 8  # characters of a secret that is looked for in other texts
_SHORTEST_VARIABLE: Final = 16  # where it is a variable's value, which may be an ordinary word
_DEEPEST: Final = 60

_known: set[str] = set()  # secrets that this process was given


def find_secrets(allowed: Collection[str] = (), env: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the variables of ``env`` that are secrets by their name, or whose value looks like one,
    except those that are ``allowed``. None means this process's variables.
    """
    return [
        name
        for name, value in (os.environ if env is None else env).items()
        if name not in allowed and (_VARIABLE.search(name) or _SIGN.search(value) or _is_wandb(name, value))
    ]


def is_secret(key: str, value: object) -> bool:
    """Return whether the value of a key of the configuration is a secret because of the key."""
    words = _WORD.sub("_", key.rpartition(".")[2]).replace("-", "_").upper()
    is_text = isinstance(value, str) and value != "" and not _NO_KEY.search(words)
    return is_text and (_KEY.search(words) is not None or _is_wandb(words, str(value)))


def mask(value: Any, key: str = "") -> Any:
    """Return ``value``, which is nested and belongs to ``key``, with ``MASK`` in place of its secrets. From then on
    :func:`mask_text` knows these.
    """
    return _mask(value, key, 0)


def mask_text(text: str) -> str:
    """Return ``text`` without what looks like a secret, and without secrets that :func:`mask` has found or that are in
    this process's environment.
    """
    secrets = {os.environ.get(name, "") for name in find_secrets()} | _known
    for secret in sorted(secrets, key=len, reverse=True):
        if secret in text and len(secret) >= (_SHORTEST if secret in _known else _SHORTEST_VARIABLE):
            text = text.replace(secret, MASK)
    return _SIGN.sub(_replace, text)


def mask_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the secrets among them."""
    masked, key = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--") and equals:
            masked.append(f"{name}={_mask_word(name, value)}")
        else:
            masked.append(_mask_word(key, word) if key and not word.startswith("--") else mask_text(word))
        key = word if word.startswith("--") and not equals else ""
    return masked


def find_masked(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the keys whose values were masked."""
    if isinstance(value, Mapping):
        for name, entry in cast("Mapping[Any, Any]", value).items():
            yield from find_masked(entry, f"{path}.{name}".strip("."))
    elif isinstance(value, list | tuple):
        yield from dict.fromkeys(
            masked_path for entry in cast("Sequence[Any]", value) for masked_path in find_masked(entry, path)
        )
    elif isinstance(value, str) and MASK in value:
        yield path


def variable_of(path: str) -> str:
    """Return the name of the environment variable that gives a masked key its value."""
    return "PODIUM_SECRET_" + re.sub(r"\W", "_", path).upper()


def _mask(value: Any, key: str, depth: int) -> Any:
    if depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {name: _mask(entry, str(name), depth + 1) for name, entry in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_mask(entry, key, depth + 1) for entry in cast("Sequence[Any]", value)]
    if not isinstance(value, str) or value == MASK:
        return value
    if is_secret(key, value):
        _known.add(value)
        return MASK
    for match in _SIGN.finditer(value):
        _known.add(match[0][len(match["head"] or match["scheme"] or match["hook"] or "") :])
    return _SIGN.sub(_replace, value)


def _mask_word(key: str, value: str) -> str:
    """The value of an option of a command line. Options of options are written as YAML."""
    if is_secret(key.lstrip("-"), value):
        return MASK
    if value.lstrip()[:1] in ("{", "["):
        inner = r"(?P<mark>['\"]?)(?P<key>[\w-]+)(?P=mark)(?P<gap>\s*:\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^,}\]]+)"

        def hide(entry: re.Match[str]) -> str:
            hidden = is_secret(entry["key"], entry["value"].strip("'\" "))
            return f"{entry['mark']}{entry['key']}{entry['mark']}{entry['gap']}{MASK}" if hidden else entry[0]

        value = re.sub(inner, hide, value)
    return mask_text(value)


def _replace(found: re.Match[str]) -> str:
    return (found["head"] or found["scheme"] or found["hook"] or "") + MASK


def _is_wandb(name: str, value: str) -> bool:
    """Whether a value is a key of W&B as they were: 40 hexadecimal digits, which a commit has as well."""
    return "WANDB" in name.upper() and re.fullmatch(r"[0-9a-f]{40}", value) is not None
