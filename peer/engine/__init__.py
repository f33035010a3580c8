"""Computing: the engine, its thread, and the scheduler that chooses what runs next.

Nothing here knows asyncio, streams or messages, except compute_thread.py, which hands results to
the loop. Read first: engine.py.
"""
