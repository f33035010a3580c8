"""ModelSpec, which says what a family's blocks are made of, and the reader of config.json.

No family and no checkpoint is known here. Read first: model_spec.py.
"""
