"""One file for each subcommand of `shoal`, with `add_arguments(parser)` and `run(options)`.

A file is named after its command; a new one is a summary and an import in `../command_table.py`.
Commands call `client/` or `peer/` and print; one with a web page has only its options here, and its
page in a package of `client/`. `shoal swarm-new` is `swarm_new.py`, and `shoal bench` is in
`../benchmarking/`. Importing a command must stay fast: torch, transformers and hivemind wait for
`run`. Code that two commands need does not belong here. Read first: generate.py.
"""
