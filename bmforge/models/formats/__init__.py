"""Checkpoint formats of other software: Hugging Face, GGUF, Megatron, ModelCenter."""
