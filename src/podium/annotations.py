"""Signatures and annotated names, read without evaluating annotations.

Since Python 3.14 an annotation is evaluated when somebody asks for it. It may name what only a type checker imports, so
that to ask would raise NameError. ForwardRef takes the place of such a name here.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return the signature of a function or class, by default that of what it wraps. Raises TypeError or ValueError for
    one that has none."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF)
    return inspect.signature(function, follow_wrapped=follow_wrapped)


def list_annotated_names(cls: type) -> Iterable[str]:
    """Return the names that the body of ``cls`` annotates, without those of its bases."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    return vars(cls).get("__annotations__", {})
