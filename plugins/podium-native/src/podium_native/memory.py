"""Keys and values of texts that no lane holds any more, in pages.

    tokens 0 to 31 ──▶ 32 to 63 ──▶ 64 to 95 ──▶ 96 to 99      A page follows its parent. Texts that begin alike share
                 └───▶ 32 to 51                                 the pages of their beginning.

A prompt takes from each page the positions at which both have the same tokens, also if these are a part of the page.
Where memory is short, the page goes first that no prompt and no text has needed for the longest time; none goes before
the pages that follow it.

Legend: L layers, K kv heads, D head_dim, T positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["Match", "Page", "PagedMemory"]

PAGE_TOKENS: Final = 32


class Page:
    """Keys and values ``[2, L, K, T, D]`` of at most ``PAGE_TOKENS`` positions.

    Attributes:
        exact: The number of positions, from the page's first, that are bit by bit as a prefill computes them.
        spare: Whether nobody is known to need it: its session has ended, or a lane has all of the text.
    """

    __slots__ = ("__weakref__", "cached", "children", "exact", "parent", "spare", "tokens")

    def __init__(self, parent: Page | None, tokens: tuple[int, ...] = ()) -> None:
        self.parent, self.tokens, self.exact, self.spare = parent, tokens, 0, False
        self.cached: Tensor | None = None
        self.children: dict[int, list[Page]] = {}  # by their first token

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self.cached is None else self.cached.nbytes

    def best_child(self, tokens: Sequence[int], reuse_completions: bool) -> tuple[Page | None, int]:
        """Return the following page that begins most like ``tokens``, and the number of positions that they share."""
        best, most = None, 0
        for page in self.children.get(tokens[0], ()) if tokens else ():
            shared = _count_alike(page.tokens, tokens)
            if not reuse_completions:
                shared = min(shared, page.exact)
            if shared > most:
                best, most = page, shared
        return best, most


class Match(NamedTuple):
    """The beginning of a prompt in memory: ``length`` positions in ``pages``, the first ``exact`` as in a prefill."""

    pages: list[Page]
    length: int
    exact: int

    def copy_into(self, keys: Tensor, values: Tensor) -> None:
        """Copy the positions to the first ones of ``keys`` and ``values [L, K, T, D]``."""
        for start, page in zip(range(0, self.length, PAGE_TOKENS), self.pages, strict=True):
            stop = min(start + PAGE_TOKENS, self.length)
            assert page.cached is not None
            keys[:, :, start:stop], values[:, :, start:stop] = page.cached[:, :, :, : stop - start]


class PagedMemory:
    """Pages of keys and values within a limit.

    Attributes:
        limit_bytes: The pages take at most so many bytes once :meth:`shrink` or :meth:`remember` returns.
        nbytes: The bytes that they take.
        evicted_tokens: Positions that were lost to the limit so far, beside those of spare pages.
    """

    def __init__(self) -> None:
        self.limit_bytes = self.nbytes = self.evicted_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = Page(None)
        self._last_pages: WeakValueDictionary[str, Page] = WeakValueDictionary()  # by session
        self._pages: OrderedDict[Page, None] = OrderedDict()  # the one that goes first stands first
        self.nbytes = 0

    def find(self, prompt: Sequence[int], reuse_completions: bool) -> Match:
        """Return the longest beginning of ``prompt`` in memory, without its last token at least.

        Positions that decoding computed count only with ``reuse_completions``.
        """
        page, pages, length, exact = self._root, list[Page](), 0, 0
        while length % PAGE_TOKENS == 0:
            tokens = tuple(prompt[length : min(length + PAGE_TOKENS, len(prompt) - 1)])
            child, shared = page.best_child(tokens, reuse_completions)
            if child is None:
                break
            pages.append(child)
            exact += min(shared, child.exact) if exact == length else 0
            length += shared
            page = child
        self._touch(page)
        return Match(pages, length, exact)

    def remember(self, text: Sequence[int], exact: int, keys: Tensor, values: Tensor, session: str = "") -> None:
        """Copy the keys and values ``[L, K, T, D]`` of ``text``, of whose positions the first ``exact`` are as in a
        prefill, where memory lacks them. ``session`` names whose text it is."""
        page = self._root
        for start in range(0, len(text), PAGE_TOKENS):
            tokens = tuple(text[start : start + PAGE_TOKENS])
            child, shared = page.best_child(tokens, reuse_completions=True)
            exact_here = min(max(exact - start, 0), len(tokens))
            if child is None or shared < min(len(child.tokens), len(tokens)):
                child = Page(page, tokens)
                page.children.setdefault(tokens[0], []).append(child)
            grown, better = len(tokens) - len(child.tokens), exact_here > child.exact
            if child.cached is None or grown > 0 or (grown == 0 and better):
                stop = start + len(tokens)
                self.nbytes -= child.nbytes
                child.tokens, child.exact = tokens, exact_here
                child.cached = torch.stack((keys[:, :, start:stop], values[:, :, start:stop]))
                self.nbytes += child.nbytes
            page = child
        if session:
            self._last_pages[session] = page
        self._touch(page)
        self.shrink()

    def forget_session(self, name: str) -> None:
        """Let the pages of a session's text that no other text follows be the first ones to go."""
        page, alone = self._last_pages.pop(name, None), list[Page]()
        while page is not None and page in self._pages and len(_list_children(page)) <= len(alone[:1]):
            alone.append(page)
            page = page.parent
        for page in reversed(alone):
            page.spare = True
            self._pages.move_to_end(page, last=False)

    def shrink(self) -> None:
        """Let pages go until the limit is kept."""
        while self.nbytes > self.limit_bytes:
            page, _ = self._pages.popitem(last=False)
            assert page.parent is not None
            siblings = page.parent.children[page.tokens[0]]
            siblings.remove(page)
            if not siblings:
                del page.parent.children[page.tokens[0]]
            self.nbytes -= page.nbytes
            self.evicted_tokens += 0 if page.spare else len(page.tokens)

    def _touch(self, page: Page) -> None:
        """Let ``page`` and, after it, those before it be the last ones to go."""
        while page.parent is not None:
            page.spare = False
            self._pages[page] = None
            self._pages.move_to_end(page)
            page = page.parent


def _list_children(page: Page) -> list[Page]:
    return [child for alike in page.children.values() for child in alike]


def _count_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    if first == second:
        return len(first)
    for count, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return count
    return min(len(first), len(second))
