"""Where OpenPrompt keeps `PrefixTuningTemplate`."""

from bmforge.compat.openprompt.templates import PrefixTuningTemplate

__all__ = ["PrefixTuningTemplate"]
