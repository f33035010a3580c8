"""One file for each subcommand of `shoal`, with `add_arguments(parser)` and `run(options)`.

A file is named after its command, and a new command is one more line in `../main.py`. A command
calls a room of `client/` or `peer/` and prints; `shoal monitor` and `shoal api`, for example, are a
file each here, and their web pages are in `client/`. Importing a command must stay fast: torch,
transformers and hivemind are imported in `run`. Code that two commands need does not belong here.
Read first: generate.py.
"""
