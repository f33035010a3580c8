"""For fine-tuning: gradients through remote blocks, and the parts that are trained by them
(autograd, LoRA adapters, prompt tuning, optimizers at peers, saving). Training from scratch is in
`peer/runs/`.

A script of a user trains with this alone; loops over texts and checkpoints of runs are in
`../finetuning/`, streams to peers in `../passes/`. Read first: autograd.py.
"""
