"""The specs that describe model families, and a reader of config.json.

No family and no checkpoint is known here. Read first: model_spec.py.
"""
