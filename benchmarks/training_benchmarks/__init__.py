"""Training from scratch, beside plain PyTorch: its speed, its losses, and what kills cost.

Begin with `speed.py`. Each file with a command in its docstring is a program of its own:
`make bench BENCHMARKS=training_benchmarks.speed`. Bits of gradients are in `engine_benchmarks/`.
"""
