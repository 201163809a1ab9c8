"""APIs of the old OpenBMB tools; programs that use these tools only change their imports.

`bmtrain/`, `model_center/`, `bminf/`, `opendelta/`, `openprompt/`, `bmcook/` and `cpm_pretrain/`
define the public names of those tools, implemented with bmforge's engine. `upstream.py` resolves
their original module paths. Start at docs/migrating/index.md, then `bmtrain/__init__.py`.
"""

from bmforge.compat.upstream import install

install()

__all__ = ["bmcook", "bminf", "bmtrain", "cpm_pretrain", "model_center", "opendelta", "openprompt"]
