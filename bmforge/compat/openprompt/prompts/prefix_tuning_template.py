"""Alias of `PrefixTuningTemplate` at OpenPrompt's import path."""

from bmforge.compat.openprompt.templates import PrefixTuningTemplate

__all__ = ["PrefixTuningTemplate"]
