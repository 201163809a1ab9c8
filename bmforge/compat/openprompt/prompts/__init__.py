"""Alias package with OpenPrompt's names of templates and verbalizers."""
