"""Subcommands of `shoal` without a room of their own, each with `add_arguments(parser)` and
`run(options)`.

A file is named after its command (`shoal swarm-new` is `swarm_new.py`); a new one is a summary and
an import in `../command_table.py`, which says where each command is: others are in `../training/`,
`../monitoring/`, `../operating/` and `../benchmarking/`. Commands call `client/` or `peer/` and
print. Importing a command must stay fast: torch, transformers and hivemind wait for `run`. Code
that two commands need does not belong here. Read first: generate.py.
"""
