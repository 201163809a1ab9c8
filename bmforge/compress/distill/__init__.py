"""Knowledge distillation: a student learns from a teacher's predictions and internal states.

Start reading at `distiller.py`; `losses.py` has the formulas, `maps.py` pairs the layers of student
and teacher, `capture.py` records internal states.
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
