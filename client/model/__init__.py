"""Models whose blocks are remote, with the interface of transformers and of PETALS.

Embeddings, norms and heads are computed here, blocks at peers. A model is handed a client
(`SwarmClient` in remote_blocks.py); only auto.py knows how one joins a swarm. What is specific to a
model family is not here, but in `models/families/`; names such as DistributedLlamaModel are those
of PETALS, and a new family needs none. Read first: base_model.py.
"""
