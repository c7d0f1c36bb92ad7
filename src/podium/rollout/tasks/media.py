"""Images, video and audio in rows, which the text that a model reads would leave out.

A medium is told by the value (bytes of a picture, {"bytes", "path"}), by the name of the column or field, or by a sign
in a text that stands for one, such as <image> or <|image_pad|>.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

_NAME: Final = re.compile(
    r"(.+_)?(image|img|picture|photo|pixel_value|video|audio|waveform|input_feature)s?"
    r"(_?(path|file|bytes|data|b64|base64|grid_thw|input|content|url|uri|link|\d+))*s?"
)
_LINK: Final = re.compile(r".*(url|uri|link)s?")
_NOT_MEDIA: Final = re.compile(
    r"(num|number|n|has|is|with|no|count|total|requires|needs|docker|container|disk|vm|os)_.*"
)
_MAGIC: Final = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF....(WEBP|WAVE|AVI )|OggS|fLaC|ID3|\xff[\xf2-\xfb]|\x1aE\xdf\xa3"
    rb"|....ftyp",
    re.DOTALL,
)
_OBJECTS: Final = ("PIL.", "torchcodec.", "torchvision.", "cv2.")  # where libraries have their images and decoders
_SCHEMAS: Final = ("tools", "functions", "tool_calls", "function_call")  # whose fields say what others may hold
_DEEPEST: Final = 6
_PLAIN: Final = (str, int, float, bool, type(None))

_SIGN: Final = re.compile(
    r"<\|(?:\w+_of_)?(?:image|img|video|audio|vision)[ _\w]*\|>"
    r"|<\w+_of_(?:image|audio|video)>|<(?:image|audio|video)_soft_token>|\[IMG(?:_\w+)?\]"
    r"|<(?:image|img|picture|video|audio)(?:[ _]?(?:\d+|placeholder|pad|token))?>",
    re.IGNORECASE,
)
_QUOTES: Final = ("``", '""', "''", "“”")
_WORD_AFTER_SIGN: Final = re.compile(
    r"\s+(?:html\W+)?(?:tag|element|token|placeholder|attribute|node|keyword)", re.IGNORECASE
)


def find_media(row: Mapping[str, Any], read: Collection[str] = ()) -> str | None:
    """Return the name of the first column, or field of one, that holds an image, video or audio; None if none does.

    Args:
        read: The columns that are read as text, whatever their names.
    """
    for name, value in row.items():
        if (path := _find(name, value, 0, named=name not in read and not _is_link(name, value))) is not None:
            return path
    return None


def find_links(row: Mapping[str, Any]) -> str | None:
    """Return the name of the first column with the address of an image, video or audio; None if there is none.

    A text may have such an address without being about the medium: a product has a picture, a transcript a video.
    """
    for name, value in row.items():
        if _is_link(name, value):
            return name
    return None


def _is_link(name: str, value: Any) -> bool:
    return _names_media(name) and isinstance(value, str) and value != "" and _LINK.fullmatch(name.lower()) is not None


def _find(name: str, value: Any, depth: int, *, named: bool) -> str | None:
    """Return the name of the medium in a column or field ``name``, and those around it; None if there is none.

    Args:
        named: Whether the name counts.
    """
    if name in _SCHEMAS or depth > _DEEPEST:
        return None
    if type(value) in _PLAIN and not _names_media(name):  # nearly all fields: the rest below is slower
        return name if _is_medium(value) else None
    if (named and _names_media(name) and not _is_empty(value)) or _is_medium(value):
        return name
    if isinstance(value, Mapping):
        for field, entry in cast("Mapping[str, Any]", value).items():
            if (path := _find(str(field), entry, depth + 1, named=True)) is not None:
                return f"{name}.{path}"
    elif isinstance(value, list | tuple):
        entries = cast("Sequence[Any]", value)
        if not (entries and type(entries[0]) in _PLAIN):
            paths = (_find(name, entry, depth + 1, named=False) for entry in entries)
            return next((path for path in paths if path is not None), None)
    return None


@lru_cache(maxsize=4096)
def _names_media(name: str) -> bool:
    lowered = name.lower()
    return _NAME.fullmatch(lowered) is not None and _NOT_MEDIA.fullmatch(lowered) is None


def _is_empty(value: Any) -> bool:
    """Whether a column says that there is no medium: nothing, no text, no entries."""
    if value is None or isinstance(value, int):
        return not value
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Mapping):
        return all(_is_empty(entry) for entry in cast("Mapping[str, Any]", value).values())
    return isinstance(value, list | tuple) and all(_is_empty(entry) for entry in cast("Sequence[Any]", value))


def _is_medium(value: Any) -> bool:
    if value is None or isinstance(value, str | int | float | list | tuple):
        return isinstance(value, str) and value.startswith(("data:image/", "data:video/", "data:audio/"))
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        is_file = fields.keys() == {"bytes", "path"} and any(entry is not None for entry in fields.values())
        return is_file or fields.keys() >= {"array", "sampling_rate"}
    if isinstance(value, bytes | bytearray | memoryview):
        return _MAGIC.match(bytes(value[:16])) is not None
    return f"{type(value).__module__}.".startswith(_OBJECTS)


def find_sign(texts: Iterable[str], tokens: Collection[str] = ()) -> str | None:
    """Return the first sign in ``texts`` that stands for an image, video or audio; None if there is none.

    A sign of which a text only speaks is none: one in quotes or code, before a word such as "tag", or with the closing
    tag of HTML.

    Args:
        tokens: The tokenizer's own tokens for whole words. A sign that is one of them counts wherever it stands.
    """
    for text in texts:
        if "<" not in text and "[IMG" not in text.upper():
            continue
        for match in _SIGN.finditer(text):
            if match[0] in tokens or not _is_spoken_of(text, match):
                return match[0]
    return None


def _is_spoken_of(text: str, match: re.Match[str]) -> bool:
    before, after = text[: match.start()], text[match.end() :]
    quoted = before[-1:] + after[:1] in _QUOTES
    in_code = before.count("```") % 2 == 1 or before.rpartition("\n")[2].count("`") % 2 == 1
    return quoted or in_code or _WORD_AFTER_SIGN.match(after) is not None or f"</{match[0][1:-1].split()[0]}" in text
