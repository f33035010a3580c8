"""Computing: the engine of a span, the thread that runs it, and the policy of its queue.

Nothing here knows streams or messages; asyncio only as far as the thread answers futures. An engine
is made in loading/. Read first: engine.py, then compute_thread.py.
"""
