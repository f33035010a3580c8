"""The `shoal` command. It reads arguments, calls a peer or a client, and prints.

`main.py` runs a command of `command_table.py` and reports its errors; `commands/` has one file for
each command. They share `options/` (reading the command line), `terminal/` (output and signals) and
`remote_models/` (opening and using a model over a swarm); `finetuning/` and `benchmarking/` are
parts of `shoal finetune` and `shoal bench`. Routing, training, serving and web pages are not here:
they belong to `client/` and `peer/`. Read first: main.py.
"""
