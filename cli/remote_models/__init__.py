"""A model over a swarm, as commands use it: opening, generating text, tracing, describing routes.

Options and the output of single commands are not here, nor is the model itself (`client/model`).
Read first: text_generation.py.
"""
