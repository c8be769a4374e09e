"""KVCache: the one face of the page bookkeeping that the scheduler sees."""

from dataclasses import dataclass, field

from kv.events import Events
from kv.hashing import extend_keys
from kv.pages import PagePool
from kv.prefix import PrefixIndex


@dataclass(eq=False, slots=True)
class Lease:
    """One sequence's hold on its pages, in the order of its tokens."""

    salt: str = ""
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens that `match` found in the cache
    keys: list[bytes] = field(default_factory=list)  # names of the sequence's first full pages
    committed: int = 0  # pages, from the front, that were found or made matchable
    asked: int = 0  # tokens looked for, until they are counted
    epoch: int = 0  # of the cache, when the lease was taken


class KVCache:
    """Pages given to sequences, and kept for later ones that begin alike.

    At any time `free + used + cached == num_pages - 1`: `used` pages are held by leases, `cached` ones by
    nobody, but they can still be matched until they are evicted.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        events: Events | None = None,
    ):
        """`events` is told which pages can be found, and which no more."""
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0  # tokens looked for, by sequences that were then given pages
        self.prefix_hits = 0  # tokens of those that were found
        self.evictions = 0  # pages
        self._epoch = 0
        self._pool = PagePool(num_pages)
        self._events = events
        self._index = PrefixIndex(events)

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def cached(self) -> int:
        return len(self._index.idle)

    @property
    def available(self) -> int:
        """Pages that `grow` could hand out now."""
        return self._pool.free + len(self._index.idle)

    @property
    def used(self) -> int:
        return self.num_pages - 1 - self.available

    @property
    def usage(self) -> float:
        """Fraction of the pages that leases hold, 0 to 1."""
        return self.used / (self.num_pages - 1)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the cache can hold, when it is alone."""
        return (self.num_pages - 1) * self.page_size

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` tokens can ever be held."""
        return length <= self.capacity_tokens

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def match(
        self, tokens: list[int], salt: str = "", *, keys: list[bytes] | None = None, skip: bool = False
    ) -> Lease:
        """Hold the longest cached prefix of `tokens`, in whole pages; at least one token is left to compute.

        Args:
            keys: the page names of this sequence so far, to save hashing again; lengthened in place.
            skip: find nothing, for who needs every token computed; the pages are still committed later.
        """
        lease = Lease(salt, keys=[] if keys is None else keys, epoch=self._epoch)
        if skip or not self.enable_prefix_caching:
            return lease
        for i in range((len(tokens) - 1) // self.page_size):
            if i == len(lease.keys):
                extend_keys(lease.keys, tokens, i + 1, self.page_size, salt)
            page = self._index.find(lease.keys[i])
            if page is None:
                break
            lease.pages.append(page)
            self._pool.holders[page] += 1
            self._index.idle.pop(page, None)
        lease.committed = len(lease.pages)
        lease.length = lease.committed * self.page_size
        lease.asked = len(tokens)
        return lease

    def grow(self, lease: Lease, length: int) -> bool:
        """Own pages for `length` tokens, evicting idle ones if need be; or change nothing and say no."""
        missing = -(-length // self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        for _ in range(missing):
            if not self._pool.free:
                self._pool.give_back(self._index.evict())
                self.evictions += 1
            lease.pages.append(self._pool.take())
        if lease.asked:
            self.prefix_queries += lease.asked
            self.prefix_hits += lease.length
            lease.asked = 0
        return True

    def commit(self, lease: Lease, tokens: list[int], length: int | None = None) -> None:
        """The first `length` tokens (all by default) are computed: their full pages can be matched now.

        A page whose equal is cached already stays private to the lease.
        """
        full = (len(tokens) if length is None else length) // self.page_size
        if full <= lease.committed or not self.enable_prefix_caching or lease.epoch != self._epoch:
            return
        extend_keys(lease.keys, tokens, full, self.page_size, lease.salt)
        for i in range(lease.committed, full):
            self._index.insert(lease.keys[i], lease.pages[i])
        lease.committed = full

    def release(self, lease: Lease) -> None:
        """Give all pages back; committed ones stay matchable until evicted. A second call does nothing."""
        committed = lease.committed if lease.epoch == self._epoch else 0
        for i in range(len(lease.pages) - 1, -1, -1):
            page = lease.pages[i]
            if i < committed:
                # The equal page that made ours private may have been evicted since: ours takes its place.
                # If it is idle, it must outlive the pages that follow ours in the tree.
                self._index.touch(self._index.insert(lease.keys[i], page))
            self._pool.holders[page] -= 1
            if self._pool.holders[page]:
                continue
            if page in self._index:
                self._index.idle[page] = None
            else:
                self._pool.give_back(page)
        lease.pages, lease.committed, lease.length = [], 0, 0

    def reset(self) -> None:
        """Forget every cached page, as after a change of weights; what leases hold now will not be cached."""
        for page in self._index.idle:
            self._pool.give_back(page)
        self._index.forget_all()
        self._epoch += 1

    def renewed(self) -> "KVCache":
        """The same before any lease and any cached page."""
        self._index.forget_all()
        return KVCache(self.num_pages, self.page_size, self.enable_prefix_caching, self._events)
