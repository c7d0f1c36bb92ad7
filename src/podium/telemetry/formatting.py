"""Numbers and foreign text, as a person reads them in a terminal."""

import math
import unicodedata


def _write_three_digits(value: float) -> str:
    """Three digits of a number below 999.5."""
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def plain(value: float) -> str:
    """Four characters or so, whatever the size: 0.3127 -> "0.313", 12.34 -> "12.3", 0.0042 -> "4.2e-3"."""
    size = abs(value)
    if size == 0 or not size < 99.95:
        return compact(value)
    if size < 0.01:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:.3f}" if size < 9.995 else _write_three_digits(value)


def compact(value: float) -> str:
    """With a unit prefix: 950 -> "950", 12345 -> "12.3k", 4.2e6 -> "4.20M"."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 999.5:
        return f"{value:.0f}"
    scaled = ((value / scale, unit) for scale, unit in ((1e3, "k"), (1e6, "M")))
    shown, unit = next((scale for scale in scaled if abs(scale[0]) < 999.5), (value / 1e9, "G"))
    return _write_three_digits(shown) + unit


def percent(share: float) -> str:
    """A share of 0..1: 0.4236 -> "42.4%"."""
    return f"{100 * share:.1f}%" if math.isfinite(share) else str(share)


def duration(seconds: float) -> str:
    """0.084 -> "84ms", 1.536 -> "1.54s", 72 -> "1m12s", 7500 -> "2h05m"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 59.95:
        return f"{1000 * seconds:.0f}ms" if seconds < 0.9995 else f"{_write_three_digits(seconds)}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def clock_duration(seconds: float) -> str:
    """Without parts of a second, for what goes on: 1.536 -> "2s", 72 -> "1m12s"."""
    return f"{seconds:.0f}s" if seconds < 59.5 else duration(seconds)


def visible(text: str, limit: int | None = None) -> str:
    """`text` with control characters spelled out, so that what a model wrote cannot move the cursor or hide itself.

    Newlines and tabs stay. Of a text longer than ``limit`` characters, the middle is left out and counted.
    """
    if limit is not None and len(text) > limit:
        head = max(1, limit * 2 // 3)
        tail = max(1, limit - head)
        text = f"{text[:head]} […{len(text) - head - tail} characters…] {text[-tail:]}"
    return text if text.isprintable() else "".join(map(_spell, text))


def _spell(character: str) -> str:
    # Cc: control characters, escape among them. Cf: marks that reorder or hide text, except for the two joiners that
    # scripts and emoji are written with. Cs: lone surrogates.
    if character in "\n\t\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"
