"""Megatron's `mpu`: process groups, tensor-parallel layers, and their collectives.

Start at `initialize.py`, then `layers.py`. `bmforge.parallel.Layout(tp=...)` shards a model without
any of this.
"""
