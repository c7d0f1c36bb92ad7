"""Find what looks like a secret, by its name or its value, and mask it.

A secret of the configuration goes to the worker that needs it, and nowhere else: files of a run, trackers, pages,
reports, the log and errors show ``MASK``. The module imports nothing of Podium.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, cast

MASK: Final = "<secret>"

_WORDS: Final = r"SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|COOKIE|WEBHOOK|NETRC|DSN|BEARER|JWT"
_VARIABLE: Final = re.compile(
    rf"({_WORDS}|TOKEN|KEY|AUTH|CONNECTION_STRING)S?(_|$)|(^|_|SSH)PASS$|_(PWD|PAT)$|^(AWS_|PAT$)", re.IGNORECASE
)  # of environments, where hardly another variable is called so
_PASSWORD: Final = re.compile(rf"({_WORDS})S?(_|$)|(^|_|SSH)PASS$|_(PWD|PAT)$|^PAT$", re.IGNORECASE)
_COUNTED: Final = re.compile(
    r"(^|_)(MAX|MIN|MOST|LEAST|NUM|NUMBER|COUNT|LIMIT|SIZE|LENGTH|LEN|BUDGET|TIMEOUT|TTL|RETRIES|ATTEMPTS|SECONDS)(_|$)",
    re.IGNORECASE,
)  # of variables whose number counts something
_FEW_DIGITS: Final = re.compile(r"(0|[1-9][0-9]{0,6})(\.[0-9]{1,3})?")
_TRUTHS: Final = frozenset({"true", "false", "yes", "no", "on", "off"})
_REGION: Final = re.compile(r"[a-z]{2,3}(-[a-z]{2,9}){1,3}-[0-9]{1,2}")
_KEY: Final = re.compile(
    rf"(^|_)(({_WORDS})S?(_URL|_VALUE)?|AUTH|AUTHORIZATION|PASS|PWD|PAT|TOKEN"
    r"|(API|ACCESS|PRIVATE|SECRET|AUTH|SIGNING|ENCRYPTION|ACCOUNT|SERVICE|SESSION|LICENSE|MASTER|ADMIN)_?KEYS?)$"
)  # of options, where a key may also be that of a mapping
_KEY_OF_NUMBER: Final = re.compile(r"(^|_)(PASSWORD|PASSWD|PASSCODE|SECRET|PASS|PWD)$")
_LEAST_NUMBER: Final = 1000  # which is a password of digits; a smaller one counts something
_PERHAPS: Final = re.compile(
    r"(KEY|TOKEN|AUTH|PASS|PW|SIG|SIGNATURE|HMAC|SALT|OTP|SAS|LICEN[CS]E|HEADER)S?(_ID|_HEADER|_VALUE)?$"
)  # of options whose value says whether it is a secret
_NO_KEY: Final = re.compile(
    r"(^|_)(STOP|PAD|PADDING|EOS|BOS|UNK|MASK|SEP|CLS|SPECIAL|END|START|BEGIN|FIRST|LAST|THINK\w*|IMAGE|VIDEO|AUDIO)_TOKEN$"
)
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # between the words of apiKey
# What may stand at each place of a long text is bounded, so that the search takes a time proportional to its length.
_SIGN: Final = re.compile(
    r"(?P<head>[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@'\"]*:)[^/\s'\"]+(?=@)"  # the password of a URL
    r"|(?P<scheme>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{12,}"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|sk_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|wandb_v1_[A-Za-z0-9_]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|npm_[A-Za-z0-9]{30,}"
    r"|(?:gsk_|xai-|nvapi-|pplx-|r8_|dop_v1_|tgp_v1_|rpa_|lsv2_[a-z]{2}_|glsa_|hvs\.|dckr_pat_|tskey-[a-z]+-|xapp-|ya29\.)"
    r"[A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r"|pypi-[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
    r"|(?P<hook>https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s'\"]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_NAMED: Final = re.compile(
    r"(?P<head>(?:key|token|secret|password|passwd|passphrase|pwd|sig|signature|credential|authorization|auth)s?"
    r"['\"]?[\s=:]{1,4}['\"]?(?:(?:token|key|apikey)\s{1,3})?)(?P<value>[A-Za-z0-9_+/=.~%-]{12,1000})"
    r"|(?<=://)(?P<user>[A-Za-z0-9_+=.~%-]{12,1000})(?=@)",
    re.IGNORECASE,
)  # a secret by the name before it, if it looks like one
_INNER: Final = re.compile(
    r"(?<![\w-])(?P<mark>['\"]?)(?P<key>[\w-]+)(?P=mark)(?P<gap>\s*:[\s\[]*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^,}\]\[{\s][^,}\]]*)"
)  # a key and its value in a text that was to be YAML
_RUN: Final = re.compile(r"[A-Za-z0-9]{12,}")
_CHANGE: Final = re.compile(r"(?<=[A-Za-z])[0-9]|(?<=[0-9])[A-Za-z]")
_LEAST_CHANGES: Final = 3  # between letters and digits
_SHORTEST: Final = 8  # characters of a secret that is looked for in other texts
_SHORTEST_VARIABLE: Final = 16  # where it is a variable's value, which may be an ordinary word
_DEEPEST: Final = 60

_known: set[str] = set()  # secrets that this process was given


def find_secrets(allowed: Collection[str] = (), env: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the variables of ``env`` that are secrets by their name, or whose value looks like one,
    except those that are ``allowed``. None means this process's variables.

    A name that speaks of a secret makes none of a value that plainly is no secret: a truth value, the region of a
    cloud, or a number of few digits where the name says that it counts something. A password may be any of these.
    """
    return [
        name
        for name, value in (os.environ if env is None else env).items()
        if name not in allowed
        and (
            (_VARIABLE.search(name) and not _is_plain(name, value))
            or next(_find_signs(value), "")
            or _is_wandb(name, value)
        )
    ]


def is_secret(key: str, value: object) -> bool:
    """Return whether the value of a key of the configuration is a secret because of the key."""
    words = _split_words(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) >= _LEAST_NUMBER and _KEY_OF_NUMBER.search(words) is not None
    if not isinstance(value, str) or not value or _NO_KEY.search(words):
        return False
    looks_drawn = _PERHAPS.search(words) is not None and _is_drawn(value)
    return looks_drawn or _KEY.search(words) is not None or _is_wandb(words, value)


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
    return _hide_signs(text)


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


def has_secrets(text: str) -> bool:
    """Return whether settings as they are written, in YAML or in what was to be YAML, have a secret among them."""
    return mask_text(_INNER.sub(_hide_inner, text)) != text


def remove_quotes(error: Exception, text: str) -> Exception:
    """Return an error of PyYAML about the settings ``text``, which quotes none of them if there is a secret among them.
    A quoted part of a secret could not be found and masked.
    """
    if has_secrets(text):
        for mark in (getattr(error, "context_mark", None), getattr(error, "problem_mark", None)):
            if mark is not None:
                mark.buffer = None
    return error


def find_masked(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the keys whose values were masked."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        if any(MASK in str(name) for name in entries):  # a source with a password, for one
            yield path
            return
        for name, entry in entries.items():
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
        of_secret = f"{key}_" if _KEY.search(_split_words(key)) else ""
        entries = cast("Mapping[Any, Any]", value).items()
        return {_hide(name): _mask(entry, f"{of_secret}{name}", depth + 1) for name, entry in entries}
    if isinstance(value, list | tuple):
        masked, option = list[Any](), ""
        for entry in cast("Sequence[Any]", value):
            masked.append(_mask(entry, option or key, depth + 1))
            option = entry if isinstance(entry, str) and entry.startswith("--") else ""  # of a command line
        return masked
    if value != MASK and is_secret(key, value):
        _known.add(str(value))
        return MASK
    return _hide(value)


def _hide(value: Any) -> Any:
    """Return a text without what looks like a secret by itself, which is known from then on; anything else as it is."""
    if not isinstance(value, str) or value == MASK:
        return value
    _known.update(_find_signs(value))
    return _hide_signs(value)


def _find_signs(text: str) -> Iterator[str]:
    """Yield the parts of a text that look like secrets."""
    for match in _SIGN.finditer(text):
        yield match[0][len(match["head"] or match["scheme"] or match["hook"] or "") :]
    for match in _NAMED.finditer(text):
        if _is_drawn(part := match["value"] or match["user"]):
            yield part


def _hide_signs(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        is_drawn = _is_drawn(match["value"] or match["user"])
        return f"{match['head'] or ''}{MASK}" if is_drawn else match[0]

    return _NAMED.sub(replace, _SIGN.sub(_replace, text))


def _is_drawn(text: str) -> bool:
    """Whether a text is a word in which letters and digits alternate, as in a key that a program has drawn."""
    if text.startswith(("/", ".", "~")) or re.search(r"\s", text):
        return False
    return any(len(_CHANGE.findall(run)) >= _LEAST_CHANGES for run in _RUN.findall(text))


def _split_words(key: str) -> str:
    """Return the last part of a dotted key as words of capital letters with underscores between."""
    return _WORD.sub("_", key.rpartition(".")[2]).replace("-", "_").upper()


def _mask_word(key: str, value: str) -> str:
    """The value of an option of a command line. Options of options are written as YAML."""
    key = key.lstrip("-")
    if is_secret(key, value):
        return MASK
    if value.lstrip()[:1] in ("{", "["):
        import yaml

        try:
            options = yaml.safe_load(value)
        except Exception:  # noqa: BLE001 - PyYAML lets pass what dates, numbers and keys raise
            return mask_text(_INNER.sub(_hide_inner, value))
        if (masked := mask(options, key)) != options:
            value = yaml.safe_dump(masked, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
            value = value.strip()
    return mask_text(value)


def _hide_inner(entry: re.Match[str]) -> str:
    hidden = is_secret(entry["key"], entry["value"].strip("'\" "))
    return f"{entry['mark']}{entry['key']}{entry['mark']}{entry['gap']}{MASK}" if hidden else entry[0]


def _replace(found: re.Match[str]) -> str:
    return (found["head"] or found["scheme"] or found["hook"] or "") + MASK


def _is_plain(name: str, value: str) -> bool:
    """Whether the value of a variable is plainly no secret, although the variable is called as those of secrets are."""
    if _PASSWORD.search(name):
        return False
    if value.lower() in _TRUTHS or (name.upper().endswith("_REGION") and _REGION.fullmatch(value)):
        return True
    is_count = _COUNTED.search(name) is not None and _KEY.search(name.upper()) is None
    return is_count and _FEW_DIGITS.fullmatch(value) is not None


def _is_wandb(name: str, value: str) -> bool:
    """Whether a value is a key of W&B as they were: 40 hexadecimal digits, which a commit has as well."""
    return "WANDB" in name.upper() and re.fullmatch(r"[0-9a-f]{40}", value) is not None
