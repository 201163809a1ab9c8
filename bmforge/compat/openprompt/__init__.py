"""OpenPrompt's API over bmforge, for programs with changed import lines.

Start at `models.py` (the modules that take a batch), then `loader.py`, `templates.py` and
`verbalizers.py`. docs/migrating/openprompt.md lists every difference and its reason.
"""

from __future__ import annotations

from bmforge.compat.names import missing_names
from bmforge.compat.openprompt import data_utils, plms, prompts, utils
from bmforge.compat.openprompt.loader import PromptDataLoader
from bmforge.compat.openprompt.models import (
    PromptForClassification,
    PromptForGeneration,
    PromptModel,
)
from bmforge.compat.openprompt.names import NAMES

__all__ = [
    "PromptDataLoader",
    "PromptForClassification",
    "PromptForGeneration",
    "PromptModel",
    "data_utils",
    "plms",
    "prompts",
    "utils",
]

__getattr__ = missing_names("openprompt", NAMES, __all__, "")
