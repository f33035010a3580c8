"""Shared by the other benchmarks: models, clients, references, helper processes, plots.

Nothing here decides what is measured, and nothing here imports another room of `benchmarks/`. Begin
with `clients.py`. Figures and their report are those of `shoal bench`, in
`cli/figures/bench_report.py`; `targets.py` adds targets to them.
"""
