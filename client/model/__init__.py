"""Models whose blocks are remote, with the interface of transformers and of PETALS.

Only embeddings, norms and heads are computed here. Read first: base_model.py.
"""
