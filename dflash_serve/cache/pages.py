"""The page pool: which page is free, shared, or kept for its contents (no torch).

A page id names one page of the target's pool and one of the draft's, so a hit brings both back.
Page 0 is the dummy page: it is never handed out and takes the writes of rows that do not count.
Every page is in exactly one state: free, in use (reference count ≥ 1), or cached (count 0 but its
contents are indexed and may be taken up again until the page is needed).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

__all__ = ["DUMMY_PAGE", "PageKey", "PagePool", "page_key"]

DUMMY_PAGE = 0

PageKey = bytes


def page_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Key of a full page: digest of the page before it and of its own tokens.

    Args:
        parent: key of the page before; for the first page, a digest of everything else the
            contents depend on (the model pair, dtype, cache salt).
        token_ids: the ids whose keys and values the page holds.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference-counted pages with an index of reusable contents.

    Args:
        num_pages: pages in the pool, the dummy page included.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[PageKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    # -- counts -----------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages kept only for their contents."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Pages that some request holds."""
        return self.usable - self.available

    # -- pages ------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, the oldest cached ones last; None when there are too few."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.popleft() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back, last page of a sequence first, so that beginnings outlive ends."""
        for page in reversed(pages):
            if self._references[page] < 1:
                raise AssertionError(f"page {page} was released more often than it was taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    # -- contents ---------------------------------------------------------------------------

    def index(self, page: int, key: PageKey) -> None:
        """Make a full page's contents findable; the first page with a key stays its page."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Take the pages of the longest indexed beginning of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
            pages.append(page)
        return pages

    def forget_contents(self) -> None:
        """Drop the index; cached pages become free."""
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert that every page is in exactly one state (tests, and cheap enough when idle)."""
        free, cached = set(self._free), set(self._cached)
        used = {p for p in range(1, self.num_pages) if self._references[p] > 0}
        assert len(self._free) == len(free), "a page is free twice"
        assert len(free | cached | used) == len(free) + len(cached) + len(used), "two states"
        assert len(free) + len(cached) + len(used) == self.usable, "a page is lost"
        assert cached <= set(self._key_of), "a cached page has no contents"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
