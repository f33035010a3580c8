"""Shared by the other benchmarks: models, clients, references, helper processes, plots.

Nothing here decides what is measured, and nothing here imports another room of `benchmarks/`. Begin
with `clients.py`. Figures are those of `shoal bench`; `report.py` adds targets to them.
"""
