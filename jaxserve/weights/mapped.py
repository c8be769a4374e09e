"""A file mapped into memory, read without trusting any offset that it claims itself."""

import mmap
import os

import numpy as np

from jaxserve.errors import CheckpointError


class MappedFile:
    """`path`, read-only; arrays returned by `view` keep the mapping alive."""

    def __init__(self, path: str):
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if not self.size:
                    raise CheckpointError("the file is empty; download it again", file=path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as why:
            raise CheckpointError("cannot open the file", file=path, found=why.strerror or str(why)) from None
        self._bytes = np.frombuffer(self._map, np.uint8)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """`nbytes` from `offset`, as uint8, not copied."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CheckpointError(
                "the file is shorter than its header says; download it again",
                file=self.path,
                expected=f"at least {offset + nbytes} bytes",
                found=f"{self.size} bytes",
            )
        return self._bytes[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.view(offset, nbytes).tobytes()

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Ask the system to read ahead: far fewer waits than one per page touched."""
        self._advise(mmap.MADV_WILLNEED, offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Drop these bytes from this process's memory; touching them again reads the file again."""
        self._advise(mmap.MADV_DONTNEED, offset, nbytes)

    def _advise(self, advice: int, offset: int, nbytes: int) -> None:
        start = offset - offset % mmap.PAGESIZE
        if nbytes:
            self._map.madvise(advice, start, offset + nbytes - start)
