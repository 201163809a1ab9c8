"""Runs any architecture of the transformers library that has no native family.

`AutoModel` and every command use `TransformersModel` when no native family opens a directory.
Start with `model.py`; `config.py` says what bmforge knows about a foreign config, `names.py` maps
parameters to stored tensors, `loss.py` computes the loss, and `probe.py` checks a small twin of the
architecture for behavior that would otherwise be silently wrong. Importing this package does not
import transformers.
"""

from bmforge.models.transformers.config import TransformersConfig
from bmforge.models.transformers.model import TransformersModel

__all__ = ["TransformersConfig", "TransformersModel"]
