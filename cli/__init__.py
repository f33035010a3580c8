"""The `shoal` command. Thin: it reads arguments, calls a peer or a client, and prints.

`main.py` finds the command and reports its errors; `commands/` has a file for each command. They
share `options/` (reading the command line), `terminal/` (output and signals) and `remote_models/`
(opening and using a model over a swarm); `finetuning/` and `figures/` are the parts of two
commands. Read first: main.py.
"""
