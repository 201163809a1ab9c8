"""What a run writes down and what is drawn of it; `inspect.py` looks into a model."""
