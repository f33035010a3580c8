"""KV caches: the cache of a session, the pool that shares out memory, and the memory itself, paged
or committed lazily.

A new number format of keys and values begins in `protocol/tensors.py` and `kernels/attention/`.
Nothing here knows blocks or what writes keys and values. Read first: kv_cache.py.
"""
