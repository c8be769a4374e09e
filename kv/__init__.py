"""Who owns which page of the key-value cache: plain bookkeeping, no arrays."""

from kv.cache import KVCache, Lease

__all__ = ["KVCache", "Lease"]
