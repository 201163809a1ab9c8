"""ModelCenter's API over bmforge, for programs with changed import lines.

Start at `model` (the model classes), then `dataset` (task data ready to train on), `layer`,
`tokenizer` and `generation`. docs/migrating/model_center.md lists the numbers that changed and why.
"""

from __future__ import annotations

from bmforge.compat.model_center.arguments import get_args
from bmforge.compat.model_center.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["get_args"]

__getattr__ = missing_names("model_center", NAMES, __all__, "")
