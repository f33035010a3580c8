"""KV caches: the cache of a session, the pool that shares out memory, and the memory itself.

Nothing here knows blocks or what writes keys and values. Read first: kv_cache.py.
"""
