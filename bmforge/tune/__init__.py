"""Tuning by few parameters (`delta/`), or by templates and label words (`prompt/`)."""
