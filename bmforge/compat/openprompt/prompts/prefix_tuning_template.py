"""Alias module with OpenPrompt's module path of `PrefixTuningTemplate`."""

from bmforge.compat.openprompt.templates import PrefixTuningTemplate

__all__ = ["PrefixTuningTemplate"]
