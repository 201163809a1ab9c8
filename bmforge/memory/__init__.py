"""Offloading of weights, activations, gradients and optimizer states to the host and disk.

This package is independent of distributed processes. Start reading at `copies.py` (asynchronous
copies), then `streaming.py` (weights), `activations.py`, `offload.py`, `gradients.py` and
`state_storage.py` (optimizer states).
"""
