"""Computing: the engine of a span, the thread that runs it, and the policy of its queue.

Nothing here knows streams or messages; of asyncio, only the futures that the compute thread
completes. An engine is made in loading/. Read first: engine.py, then compute_thread.py.
"""
