"""Prompt-based learning: templates, label words and few-shot examples for any model family.

Start reading at `language.py` (the template language), then `template.py` (examples to token ids),
`prompt_formats.py` and `prompt_assembly.py` (the input format of each kind of model),
`verbalizer.py` (token scores to class scores), `classifier.py` and `generator.py`; `rows.py`
provides prompts for a training run.
"""

from bmforge.tune.prompt.automatic import AutomaticVerbalizer, find_label_tokens
from bmforge.tune.prompt.classifier import ClassOutput, PromptClassifier, calibrate
from bmforge.tune.prompt.ensemble import classify_together
from bmforge.tune.prompt.generation import GenerationVerbalizer
from bmforge.tune.prompt.generator import PromptGenerator, WriteOutput
from bmforge.tune.prompt.kinds import PrefixTemplate, PTRTemplate, PTuning, SoftTemplate
from bmforge.tune.prompt.language import parse_template
from bmforge.tune.prompt.levels import score_levels
from bmforge.tune.prompt.pieces import Piece, TemplateError
from bmforge.tune.prompt.post_processing import register_post_processing
from bmforge.tune.prompt.prompt_assembly import Encoded
from bmforge.tune.prompt.rows import (
    PromptRows,
    TargetRows,
    prompt_objective,
    target_objective,
)
from bmforge.tune.prompt.sampler import draw_few
from bmforge.tune.prompt.search_template import search_templates
from bmforge.tune.prompt.search_words import search_label_words
from bmforge.tune.prompt.soft import draw_rows_, fold_rows_
from bmforge.tune.prompt.template import Template, read_template
from bmforge.tune.prompt.trained_verbalizers import PrototypeVerbalizer, SoftVerbalizer
from bmforge.tune.prompt.verbalizer import (
    KnowledgeableVerbalizer,
    ManualVerbalizer,
    OneToOneVerbalizer,
    PTRVerbalizer,
)

__all__ = [
    "AutomaticVerbalizer",
    "ClassOutput",
    "Encoded",
    "GenerationVerbalizer",
    "KnowledgeableVerbalizer",
    "ManualVerbalizer",
    "OneToOneVerbalizer",
    "PTRTemplate",
    "PTRVerbalizer",
    "PTuning",
    "Piece",
    "PrefixTemplate",
    "PromptClassifier",
    "PromptGenerator",
    "PromptRows",
    "PrototypeVerbalizer",
    "SoftTemplate",
    "SoftVerbalizer",
    "TargetRows",
    "Template",
    "TemplateError",
    "WriteOutput",
    "calibrate",
    "classify_together",
    "draw_few",
    "draw_rows_",
    "find_label_tokens",
    "fold_rows_",
    "parse_template",
    "prompt_objective",
    "read_template",
    "register_post_processing",
    "score_levels",
    "search_label_words",
    "search_templates",
    "target_objective",
]
