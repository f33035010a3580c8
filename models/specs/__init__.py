"""The parts that families are described with: the spec of a model, and a reader of config.json.

Knows no family and no checkpoint. Read first: model_spec.py.
"""
