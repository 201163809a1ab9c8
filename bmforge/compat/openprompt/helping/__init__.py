"""OpenPrompt's `utils` modules; start at `calibrate.py`."""
