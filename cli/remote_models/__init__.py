"""A model over a swarm, as commands use it: opening, generating text, tracing, describing routes.

Code of a single command stays with that command; the model itself is in `client/model`.
Read first: text_generation.py.
"""
