"""The soft rows of a template: how they are numbered, drawn, made and folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.prompt import Prompt
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.pieces import Piece

__all__ = ["MadeRows", "SoftRow", "fold_rows_", "number_rows", "put_rows_"]


@dataclass(frozen=True)
class SoftRow:
    """One trained row.

    Args:
        token: id of the token whose row it begins as; -1 draws it.
        word: that token's text.
    """

    token: int = -1
    word: str = ""


def number_rows(
    pieces: Sequence[Piece], tokenizer: Tokenizer
) -> tuple[tuple[SoftRow, ...], list[tuple[int, ...]]]:
    """Return all rows, and for every piece the numbers of its rows, from 1.

    Pieces with one soft_id share theirs; words take as many rows as they have tokens.
    """
    rows: list[SoftRow] = []
    shared: dict[int, tuple[int, ...]] = {}
    numbers: list[tuple[int, ...]] = []

    def add(piece: Piece) -> tuple[int, ...]:
        fresh = [SoftRow()]
        if piece.value:
            ids = tokenizer.encode_plain([piece.value])[0]
            fresh = [SoftRow(id, tokenizer.decode([id]).strip()) for id in ids]
        rows.extend(fresh)
        return tuple(range(len(rows) - len(fresh) + 1, len(rows) + 1))

    for piece in pieces:
        found: tuple[int, ...] = ()
        if piece.kind == "soft":
            found = shared[piece.soft_id] if piece.soft_id in shared else add(piece)
            if piece.soft_id:
                shared[piece.soft_id] = found
            one = found
            for _ in range(piece.duplicate - 1):
                found += one if piece.same else add(piece)
        numbers.append(found)
    return tuple(rows), numbers


class MadeRows(nn.Module):
    """Rows that small layers make of trained ones: P-tuning. It stands where a `Prompt` would.

    Args:
        length: P.
        width: D.
        kind: "lstm" (two layers, both ways, then two linear ones) or "mlp".

    Shape:
        rows: any, integers below P -> (..., D)

    Source: Liu et al., "GPT understands, too" (2021).
    """

    def __init__(self, length: int, width: int, kind: str) -> None:
        super().__init__()
        if kind not in ("lstm", "mlp"):
            raise ConfigError(f"encoder={kind!r} is unknown. Known: lstm, mlp.")
        self.inputs = nn.Embedding(length, width)
        both = 2 * width if kind == "lstm" else width
        self.lstm = (
            nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)
            if kind == "lstm"
            else None
        )
        self.mlp = nn.Sequential(nn.Linear(both, width), nn.ReLU(), nn.Linear(width, width))

    @property
    def weight(self) -> Tensor:
        """The rows, (P, D), made anew at every call."""
        rows = self.inputs.weight
        if self.lstm is not None:
            rows = self.lstm(rows[None])[0][0]
        return self.mlp(rows)

    def forward(self, rows: Tensor) -> Tensor:
        """Look rows up."""
        return nn.functional.embedding(rows, self.weight)


def put_rows_(model: Any, rows: Sequence[SoftRow], encoder: str, seed: int) -> nn.Module:
    """Put rows behind a model's token table; return the part that has them.

    Raises:
        ConfigError: it has some already, or no table of tokens.
    """
    table = getattr(model, "embed", None)
    if not isinstance(table, nn.Embedding):
        raise ConfigError(
            f"{type(model).__name__} has no token embedding `embed` for soft rows to stand behind."
        )
    if getattr(table, "prompt", None) is not None:
        raise ConfigError("the model has soft rows already: open it anew for another template.")
    width, words = table.embedding_dim, [row.token for row in rows]
    generator = torch.Generator().manual_seed(seed)
    if encoder:
        table.prompt = MadeRows(len(rows), width, encoder).to(table.weight)
        return table.prompt
    part = Prompt(len(rows), width).to(table.weight)
    with torch.no_grad():
        std = float(table.weight.float().std())
        drawn = torch.randn(part.weight.shape, generator=generator) * std
        known = torch.tensor([max(token, 0) for token in words])
        is_drawn = torch.tensor([token < 0 for token in words])[:, None]
        part.weight.copy_(torch.where(is_drawn, drawn.to(table.weight), table.weight[known]))
    table.prompt = part
    _remember(model, part)
    return part


def _remember(model: Any, rows: Prompt) -> None:
    """Let a model of ours say in its config that it has rows, so that it is opened with them."""
    tell = getattr(model, "remember_part_", None)
    if callable(tell):
        tell("prompt", ["embed"], {"length": rows.weight.shape[0]}, "")


def fold_rows_(model: Any) -> None:
    """Replace what makes a model's rows by the rows that it made."""
    made = model.embed.prompt
    if isinstance(made, MadeRows):
        rows = made.weight.detach()
        model.embed.prompt = Prompt(*rows.shape).to(rows)
        with torch.no_grad():
            model.embed.prompt.weight.copy_(rows)
        _remember(model, model.embed.prompt)
