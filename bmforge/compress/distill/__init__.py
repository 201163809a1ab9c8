"""Teaching a model by another one: what it predicts, and what it has inside.

Start reading at `distiller.py`; `losses.py` has the formulas, `maps.py` says which layer learns
from which, `capture.py` gets at what is inside.
"""

from bmforge.compress.distill.answers import TeacherAnswers, write_answers
from bmforge.compress.distill.config import DistillConfig, DistillLoss
from bmforge.compress.distill.distiller import Distiller

__all__ = [
    "DistillConfig",
    "DistillLoss",
    "Distiller",
    "TeacherAnswers",
    "write_answers",
]
