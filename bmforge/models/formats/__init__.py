"""Checkpoints as others write them: Hugging Face, Megatron, ModelCenter; see `convert.py`."""
