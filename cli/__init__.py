"""The `shoal` command. Thin: it reads arguments, calls a peer or a client, and prints."""
