"""A model over a swarm, as commands use it: opening, generating text, tracing, describing routes.

Options and the screens of single commands are elsewhere. Read first: text_generation.py.
"""
