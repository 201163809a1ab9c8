"""ModelCenter's names over bmforge: its programs run with their import lines changed.

Start reading at `model` (the old model classes over the zoo's), then `dataset` (task data ready to
train on), `layer`, `tokenizer` and `generation`. What changed in numbers, and why, is in
docs/migrating_model_center.md.
"""

from __future__ import annotations

from bmforge.compat.model_center.arguments import get_args
from bmforge.compat.model_center.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["get_args"]

__getattr__ = missing_names("model_center", NAMES, __all__, "")
