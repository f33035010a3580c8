"""A model over a swarm, as commands use it: opening, generating text, tracing, describing routes.

What single commands have of their own is not here, nor is the model itself (`client/model`).
Read first: text_generation.py.
"""
