"""Vocabularies for the CPM-Bee tests.

The golden tables were made with the published vocabulary of 86,583 tokens. It is not part of this
repository; the few tokens that the tables use stand here at their published ids, and all others are
replaced by characters that no text has.
"""

from __future__ import annotations

from functools import cache

from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

PUBLISHED_SIZE = 86583
SPECIALS = [
    "<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>",
    "<option>",
]  # fmt: skip
PUBLISHED_IDS = {
    **{token: i for i, token in enumerate(SPECIALS)},
    "<eod>": 65756,
    "今天": 9803,
    "天气": 14963,
    "是": 1730,
    "真的": 23974,
    "野": 2516,
    "家": 2350,
    "input": 65678,
    "好": 832,
}


@cache
def golden_tokenizer() -> CPMBeeTokenizer:
    tokens = [chr(0xF0000 + i // 60000) + chr(0x100000 + i % 60000) for i in range(PUBLISHED_SIZE)]
    for token, i in PUBLISHED_IDS.items():
        tokens[i] = token
    return CPMBeeTokenizer(tokens)


@cache
def small_tokenizer() -> CPMBeeTokenizer:
    words = ["今天", "今天天气", "天气", "好吃", "input", "inputs", "option", "a<b", "<", ">", "_"]
    letters = (
        "abcdefghijklmnopqrstuvwxyz0123456789?()-.，。？！今天气很好吃的是真在评分多少选择问题"
    )
    return CPMBeeTokenizer([*SPECIALS, *dict.fromkeys([*words, *letters])])
