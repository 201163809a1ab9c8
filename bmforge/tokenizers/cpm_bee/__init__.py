"""CPM-Bee: tokenizer, and conversion of documents to batches; start reading at `tokenizer.py`."""

from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["CPMBeeTokenizer"]
