"""What lives where: on the device, on the host, on disk; and how it gets there in time.

Knows nothing of processes. Start reading at `copies.py` (moving tensors beside the work), then
`streaming.py` (weights), `activations.py` (what backward needs), `offload.py`, `gradients.py` and
`homes.py` (what an optimizer needs).
"""
