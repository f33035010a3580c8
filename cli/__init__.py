"""The `shoal` command. It reads arguments, calls a peer or a client, and prints.

`main.py` runs a command of `command_table.py` and reports its errors; `commands/` has one file for
each command that has no room of its own. They share `options/` (reading the command line),
`terminal/` (output and signals) and `remote_models/` (opening and using a model over a swarm);
`finetuning/`, `training/`, `monitoring/`, `operating/` and `benchmarking/` are what those commands
are made of. Routing, training, serving and web pages are not here: they belong to `client/` and
`peer/`. Read first: main.py.
"""
