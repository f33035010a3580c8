"""KV caches: pages, pools, layouts, and copies of common prefixes.

Read first: kv_cache.py.
"""
