"""What the files of families are written with: the spec of a model, and a reader of config.json.

Knows no family and no checkpoint. Read first: model_spec.py.
"""
