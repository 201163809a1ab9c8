"""CPM-Bee: its tokenizer, and documents turned into batches; start reading at `tokenizer.py`."""
