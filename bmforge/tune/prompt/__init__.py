"""Prompts: templates, label words and few examples on any family.

Start reading at `language.py` (what a template's text may say), then `template.py` (examples to
ids), `verbalizer.py` (scores of tokens to scores of classes) and `classifier.py`.
"""

from bmforge.tune.prompt.automatic import find_label_tokens
from bmforge.tune.prompt.classifier import ClassOutput, PromptClassifier, calibrate
from bmforge.tune.prompt.ensemble import classify_together
from bmforge.tune.prompt.language import parse_template
from bmforge.tune.prompt.pieces import Piece, TemplateError
from bmforge.tune.prompt.post_processing import register_post_processing
from bmforge.tune.prompt.sampler import draw_few
from bmforge.tune.prompt.soft import fold_rows_
from bmforge.tune.prompt.template import Encoded, Template, read_template
from bmforge.tune.prompt.verbalizer import (
    KnowledgeableVerbalizer,
    ManualVerbalizer,
    OneToOneVerbalizer,
    PTRVerbalizer,
)

__all__ = [
    "ClassOutput",
    "PromptClassifier",
    "calibrate",
    "classify_together",
    "Encoded",
    "KnowledgeableVerbalizer",
    "ManualVerbalizer",
    "OneToOneVerbalizer",
    "PTRVerbalizer",
    "Piece",
    "Template",
    "TemplateError",
    "draw_few",
    "find_label_tokens",
    "fold_rows_",
    "parse_template",
    "read_template",
    "register_post_processing",
]
