"""The index of cached pages: a tree of prefixes by name, and the order in which idle pages are evicted.

A name contains its parent's, so the tree needs no pointers. A sequence gives its pages back last page first,
so in the order of eviction every idle page comes before its parent: leaves go before what they hang on.
"""

from collections import OrderedDict


class PrefixIndex:
    """Which page holds which prefix; `idle` are those that no lease holds, least recently used first."""

    def __init__(self):
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def insert(self, key: bytes, page: int) -> int:
        """The page that is cached under `key`: the one already there, or else `page` from now on."""
        cached = self._page_of.setdefault(key, page)
        if cached == page:
            self._key_of[page] = key
        return cached

    def touch(self, page: int) -> None:
        """If the page is idle, it becomes the last to be evicted."""
        if page in self.idle:
            self.idle.move_to_end(page)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def evict(self) -> int:
        """Forget the least recently used idle page and return it."""
        page, _ = self.idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
