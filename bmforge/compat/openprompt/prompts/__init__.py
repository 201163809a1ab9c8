"""Alias package with OpenPrompt's names of templates and verbalizers."""

from bmforge.compat.names import missing_names
from bmforge.compat.openprompt.names import NAMES
from bmforge.compat.openprompt.templates import (
    ManualTemplate,
    MixedTemplate,
    PrefixTuningTemplate,
    PTRTemplate,
    PtuningTemplate,
    SoftTemplate,
)
from bmforge.compat.openprompt.verbalizers import (
    AutomaticVerbalizer,
    GenerationVerbalizer,
    KnowledgeableVerbalizer,
    ManualVerbalizer,
    One2oneVerbalizer,
    ProtoVerbalizer,
    PTRVerbalizer,
    SoftVerbalizer,
)

__all__ = [
    "AutomaticVerbalizer",
    "GenerationVerbalizer",
    "KnowledgeableVerbalizer",
    "ManualTemplate",
    "ManualVerbalizer",
    "MixedTemplate",
    "One2oneVerbalizer",
    "PTRTemplate",
    "PTRVerbalizer",
    "PrefixTuningTemplate",
    "ProtoVerbalizer",
    "PtuningTemplate",
    "SoftTemplate",
    "SoftVerbalizer",
]

__getattr__ = missing_names("openprompt", NAMES, __all__, "prompts")
