"""CPM-Bee: its tokenizer, and documents turned into batches; start reading at `tokenizer.py`."""

from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["CPMBeeTokenizer"]
