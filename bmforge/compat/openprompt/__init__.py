"""OpenPrompt's API over bmforge, for programs with changed import lines.

Start at `models.py` (the modules that take a batch), then `loader.py`, `templates.py` and
`verbalizers.py`. docs/migrating/openprompt.md lists every difference and its reason.
"""
