"""CPM-Bee's tokenizer, and conversion of its documents to batches; start at `tokenizer.py`."""

from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["CPMBeeTokenizer"]
