"""A third party's verbalizer class, a plain module: a class scores as its best word does."""

from __future__ import annotations

import torch
from torch import nn

from bmforge.tune.prompt.words import spell_word


class BestWord(nn.Module):
    """Takes class -> words; of a word its first token."""

    takes, normalize, num_masks = "logits", True, 1

    def __init__(self, words, tokenizer, join="first"):
        super().__init__()
        assert join == "first"
        self.ids = [[spell_word(word, tokenizer)[0] for word in row] for row in words.values()]
        self.num_classes = len(self.ids)

    def forward(self, logits):
        """(B, V) -> (B, C)."""
        return torch.stack([logits[:, ids].amax(-1) for ids in self.ids], -1).log_softmax(-1)


class Trained(BestWord):
    """One with a weight, which a run would not train."""

    def __init__(self, words, tokenizer):
        super().__init__(words, tokenizer)
        self.weight = nn.Parameter(torch.ones(()))


class Silent(nn.Module):
    """One that says nothing of itself."""

    def __init__(self, words, tokenizer):
        super().__init__()
