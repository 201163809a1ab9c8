"""Tokenizers that the ``tokenizers`` library lacks, and `AutoTokenizer` for all tokenizers.

Start reading at `auto.py` (selects the class for a directory) and `base.py` (the interface:
`encode` returns a list of ids for every tokenizer). The tokenizers are in `cpm1`, `cpm2` (also
EVA), `cpm_ant`, `cpm_bee` and `glm`; `words` segments Chinese text into words, `word_encoder` and
`longest_match` split words into tokens of the vocabulary; GLM and CPM-1 use `glm_text` and
`sentence_piece`; `tokenizer_json` and `spiece` read Hugging Face's files for `fast`;
`chat_template` renders conversations. `cpm_bee` also converts CPM-Bee's documents to model inputs
and back.
"""

from __future__ import annotations

from bmforge.tokenizers.auto import AutoTokenizer
from bmforge.tokenizers.base import Tokenizer
from bmforge.tokenizers.cpm1 import CPM1Tokenizer
from bmforge.tokenizers.cpm2 import CPM2Tokenizer, EVATokenizer
from bmforge.tokenizers.cpm_ant import CPMAntPlusTokenizer, CPMAntTokenizer
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer
from bmforge.tokenizers.fast import FastTokenizer
from bmforge.tokenizers.glm import GLMTokenizer

__all__ = [
    "AutoTokenizer",
    "CPM1Tokenizer",
    "CPM2Tokenizer",
    "EVATokenizer",
    "CPMAntPlusTokenizer",
    "CPMAntTokenizer",
    "CPMBeeTokenizer",
    "GLMTokenizer",
    "FastTokenizer",
    "Tokenizer",
]
