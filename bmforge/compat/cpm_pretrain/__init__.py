"""CPM-Pretrain's arguments, scripts and config files, as fields of a run.

Start reading at `arguments.py`, the table, then `migrate.py`, which reads scripts by it.
"""

from __future__ import annotations

from bmforge.compat.cpm_pretrain.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["NAMES"]

__getattr__ = missing_names("cpm_pretrain", NAMES, __all__)
