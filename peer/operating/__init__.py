"""What the owner of a machine sees of the peer that runs on it, and sets.

Figures are read from the objects that know them, on the event loop, when somebody asks; nothing is
collected for it, but the events of a training run (`run_figures.py`). The peer knows nothing of
this room: `operation.py` stands beside it. HTTP is served by uvicorn on the peer's own loop, since
a thread with another server (prometheus_client has one) would read what the loop is just changing;
only the text is written in a thread. `control.py` is what the owner may do, `operator_server.py`
serves that over gRPC, and `schedule.py` pauses the peer by the clock and by what it and others use.
Read first: operation.py.
"""
