"""OpenPrompt's API, implemented with bmforge, for programs that only change their imports.

Start at `models.py` (the modules that take a batch), then `loader.py`, `templates.py` and
`verbalizers.py`. docs/migrating/openprompt.md lists every difference and its reason.
"""
