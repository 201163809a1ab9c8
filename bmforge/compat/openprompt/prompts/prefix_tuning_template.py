"""Alias at OpenPrompt's import path of `PrefixTuningTemplate`."""

from bmforge.compat.openprompt.templates import PrefixTuningTemplate

__all__ = ["PrefixTuningTemplate"]
