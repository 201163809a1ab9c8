"""Examples, batches and samplers; start at `data_sampler.py`."""

from bmforge.compat.names import missing_names
from bmforge.compat.openprompt.data_utils.data_sampler import FewShotSampler
from bmforge.compat.openprompt.examples import InputExample, InputFeatures
from bmforge.compat.openprompt.names import NAMES

__all__ = ["FewShotSampler", "InputExample", "InputFeatures"]

__getattr__ = missing_names("openprompt", NAMES, __all__, "data_utils")
