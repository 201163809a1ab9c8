"""Tokenizers that the ``tokenizers`` library does not do itself, and one door to all.

Start reading at `auto.py` (which directory is opened with what) and `base.py` (what every
tokenizer can do: `encode` gives a list of ids, whichever it is). `cpm1`, `cpm2` (EVA too),
`cpm_ant`, `cpm_bee` and `glm` are the kinds; `words` cuts Chinese text into words, `word_pieces`
and `longest_match` cut words into the pieces of a vocabulary; `glm_text` and `sentence_piece` serve
GLM and CPM-1; `tokenizer_json` and `spiece` read Hugging Face's files, which `fast` gives our
methods; `chat_template` writes conversations. The files of `cpm_bee` turn CPM-Bee's documents into
model inputs and back.
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
