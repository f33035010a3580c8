"""Training from scratch: `shoal train`, `train-plan`, `export`, and the run of `shoal serve
--train`.

run_file.py only reads TOML: fields of run files are in `protocol/runs/training_run.py`. The
computing is in `peer/engine/training/`. Read first: train.py.
"""
