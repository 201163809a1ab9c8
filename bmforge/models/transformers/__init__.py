"""Runs architectures of the transformers library that have no native family.

`AutoModel` and every command use `TransformersModel` if no native family supports a model. Start
reading at `model.py`; `config.py` extracts the sizes from a transformers config, `names.py` maps
parameters to stored tensors, `loss.py` computes the loss, and `probe.py` tests a small copy of the
architecture for behavior that would otherwise cause silent errors. Importing this package does not
import transformers.
"""

from bmforge.models.transformers.config import TransformersConfig
from bmforge.models.transformers.model import TransformersModel

__all__ = ["TransformersConfig", "TransformersModel"]
