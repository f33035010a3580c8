"""The monitor of a swarm: what it serves, who serves it, and how that changed.

`collector.py` reads the directory and dials peers. `state.py` turns what was read into the state of
the swarm and its events, `description.py` into what people see: the page, the terminal, JSON and
the exit code show that and nothing else. `history.py` keeps events and replica depths on disk.
`canary.py` runs a process that generates, `alerts.py` finds what `webhook.py` posts. Nothing here
needs the files of a model. Read first: state.py.
"""
