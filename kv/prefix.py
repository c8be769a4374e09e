"""The index of cached pages: a tree of prefixes by name, and the order in which idle pages are evicted.

A name contains its parent's, so the tree needs no pointers. A sequence gives its pages back last page first,
so in the order of eviction every idle page comes before its parent: leaves go before what they hang on.
"""

from collections import OrderedDict

from kv.events import Events


class PrefixIndex:
    """Which page holds which prefix; `idle` are those that no lease holds, least recently used first."""

    def __init__(self, events: Events | None = None):
        self._events = events
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def insert(self, key: bytes, page: int) -> int:
        """The page that is cached under `key`: the one already there, or else `page` from now on."""
        cached = self._page_of.setdefault(key, page)
        if cached == page and page not in self._key_of:
            self._key_of[page] = key
            if self._events:
                self._events.stored(key)
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
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self._events:
            self._events.removed(key)
        return page

    def forget_all(self) -> None:
        """No page can be found any more."""
        if self._events:
            for key in self._page_of:
                self._events.removed(key)
        self._page_of.clear()
        self._key_of.clear()
        self.idle.clear()
