"""Checkpoints as others write them: Hugging Face, GGUF, Megatron, ModelCenter; see `convert.py`."""
