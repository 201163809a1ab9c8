"""OpenPrompt's `utils` modules; start at `calibrate.py`."""

from bmforge.compat.openprompt.helping.calibrate import calibrate
from bmforge.compat.openprompt.helping.metrics import (
    classification_metrics,
    evaluate,
    generation_metric,
)
from bmforge.compat.openprompt.helping.reproduciblity import set_seed

__all__ = ["calibrate", "classification_metrics", "evaluate", "generation_metric", "set_seed"]
