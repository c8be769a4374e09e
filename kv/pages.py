"""The pool of pages: which are free, and how many leases hold each of the others."""


class PagePool:
    """Pages 1..num_pages-1; page 0 is never given out, because padding rows write there."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} leaves none to use (page 0 is padding); give at least 2")
        self._free = list(range(num_pages - 1, 0, -1))
        self.holders = [0] * num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once."""
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def give_back(self, page: int) -> None:
        """The page, held by nobody, is free again."""
        assert not self.holders[page], f"page {page} is still held"
        self._free.append(page)
