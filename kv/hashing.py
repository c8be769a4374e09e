"""Names of full pages: a strong hash of a page's tokens and of everything before them.

Equal names mean equal prefixes, so a look-up needs no comparison of tokens. Python's own `hash` would not do:
it is 64 bits wide and can be steered by whoever writes the prompt, who could then read another's cache.
"""

import struct
from hashlib import blake2b

DIGEST_SIZE = 32  # bytes


def root_key(salt: str) -> bytes:
    """What stands before the first page; prefixes are shared only under the same `salt`."""
    return blake2b(b"root" + salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def extend_keys(keys: list[bytes], tokens: list[int], pages: int, page_size: int, salt: str) -> None:
    """Lengthen `keys`, the names of the first pages of `tokens`, to at least `pages` of them.

    Names already there are kept, so a sequence is hashed once over its whole life.
    """
    parent = keys[-1] if keys else root_key(salt)
    pack = struct.Struct(f"<{page_size}I").pack
    for start in range(len(keys) * page_size, pages * page_size, page_size):
        parent = blake2b(parent + pack(*tokens[start : start + page_size]), digest_size=DIGEST_SIZE).digest()
        keys.append(parent)
