"""Rows of `benchmarks/gpu.py`: the list is in `table.py`, each other module measures one area."""
