"""Trained (soft) tokens of a template: initialization, reparameterization, and removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from bmforge.errors import ConfigError
from bmforge.nn.prompt import ExtraEmbeddings
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.pieces import Piece

__all__ = [
    "PTuningEncoder",
    "SoftRow",
    "draw_rows_",
    "fold_rows_",
    "number_rows",
    "put_rows_",
    "token_table",
]


@dataclass(frozen=True)
class SoftRow:
    """Initialization of the trained embedding of one soft token.

    Args:
        token: id of the token whose embedding initializes the soft token; -1 for a random
            initialization.
        word: text of that token.
    """

    token: int = -1
    word: str = ""


def number_rows(
    pieces: Sequence[Piece], tokenizer: Tokenizer
) -> tuple[tuple[SoftRow, ...], list[tuple[int, ...]]]:
    """Assign soft tokens to pieces; return all soft tokens, and their indices for each piece.

    Indices start at 1. Pieces with the same soft_id share soft tokens; a word gets one soft token
    for each of its tokens.
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
        numbers_of_piece: tuple[int, ...] = ()
        if piece.kind == "soft":
            numbers_of_piece = shared[piece.soft_id] if piece.soft_id in shared else add(piece)
            if piece.soft_id:
                shared[piece.soft_id] = numbers_of_piece
            repeated = numbers_of_piece
            for _ in range(piece.duplicate - 1):
                numbers_of_piece += repeated if piece.same else add(piece)
        numbers.append(numbers_of_piece)
    return tuple(rows), numbers


class PTuningEncoder(nn.Module):
    """P-tuning encoder, which computes the embeddings of soft tokens from trained inputs.

    Args:
        length: number of soft tokens, P.
        width: embedding size, D.
        kind: "lstm" (two bidirectional layers, then two linear ones) or "mlp".

    Shape:
        rows: any shape (...), integers below P -> (..., D)

    Source: Liu et al., "GPT understands, too" (2021).
    """

    def __init__(self, length: int, width: int, kind: str) -> None:
        super().__init__()
        if kind not in ("lstm", "mlp"):
            raise ConfigError(f"unknown encoder: encoder={kind!r} (supported: lstm, mlp).")
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
        """Embeddings of the soft tokens, (P, D), computed at every access."""
        rows = self.inputs.weight
        if self.lstm is not None:
            rows = self.lstm(rows[None])[0][0]
        return self.mlp(rows)

    def forward(self, rows: Tensor) -> Tensor:
        """Look up the embeddings of soft tokens by their indices."""
        return nn.functional.embedding(rows, self.weight)


def token_table(model: Any) -> nn.Embedding:
    """Return the token embedding of a bmforge or transformers model.

    Raises:
        ConfigError: the model has no token embedding.
    """
    table = getattr(model, "embed", None)
    if table is None and hasattr(model, "get_input_embeddings"):
        table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ConfigError(
            f"{type(model).__name__} has no token embedding `embed` to which soft tokens "
            "can be attached. Use a bmforge model."
        )
    return table


def put_rows_(model: Any, rows: Sequence[SoftRow], encoder: str, seed: int) -> nn.Module:
    """Attach soft tokens to a model's token embedding; return the module with their embeddings.

    A model on the meta device may already have the soft tokens, created from its config.

    Raises:
        ConfigError: the model has other soft tokens already, or has no token embedding.
    """
    table = token_table(model)
    attached = getattr(table, "prompt", None)
    if (
        isinstance(attached, ExtraEmbeddings)
        and attached.weight.is_meta
        and len(attached.weight) == len(rows)
    ):
        if encoder:
            raise ConfigError(
                f"encoder={encoder!r} has no effect in a run: the model's config contains the soft "
                "tokens, which are trained directly. Train an encoder with PromptClassifier."
            )
        return attached
    if attached is not None:
        raise ConfigError(
            "the model has the soft tokens of another template. Remove them with drop_rows_(model)."
        )
    width = table.embedding_dim
    like: Any = getattr(table, "like", table.weight)  # a quantized table has no plain weight
    if encoder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoded = PTuningEncoder(len(rows), width, encoder)
        table.prompt = encoded.to(like)
        return table.prompt
    table.prompt = ExtraEmbeddings(len(rows), width).to(like)
    if not like.is_meta:
        draw_rows_(model, rows, seed)
    _remember(model, table.prompt)
    return table.prompt


@torch.no_grad()
def draw_rows_(model: Any, rows: Sequence[SoftRow], seed: int = 0) -> None:
    """Initialize the soft-prompt embeddings from those of their words, or at random.

    Args:
        model: model on any layout; every process gets the same values.
        rows: initialization of each soft token of the model's template.
        seed: random seed of embeddings without initialization words; their standard deviation is
            that of the token embedding.

    Memory: a quantized token embedding is dequantized.

    Comm: on a sharded embedding, two all-reduces.
    """
    table: Any = token_table(model)
    weight = table.weight if table.weight is not None else table.dense(table.like.dtype)
    spread = weight.float().std()
    std = float(spread.full_tensor() if isinstance(spread, DTensor) else spread)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(table.prompt.weight.shape, generator=generator) * std
    ids = torch.tensor([max(row.token, 0) for row in rows], device=weight.device)
    is_drawn = torch.tensor([row.token < 0 for row in rows], device=weight.device)[:, None]
    words = weight.full_tensor() if isinstance(weight, DTensor) else weight
    values = torch.where(is_drawn, drawn.to(words), words[ids])
    target = table.prompt.weight
    if isinstance(target, DTensor):
        values = distribute_tensor(values, target.device_mesh, target.placements)
    target.copy_(values)


def _remember(model: Any, rows: ExtraEmbeddings) -> None:
    """Record the soft tokens in the config of a bmforge model, so that loading creates them."""
    tell = getattr(model, "record_part_", None)
    if callable(tell):
        tell("prompt", ["embed"], {"length": rows.weight.shape[0]}, "")


def drop_rows_(model: Any) -> None:
    """Remove the soft tokens of a model, if any, so that another template can add its own.

    Templates that use the removed soft tokens no longer work.
    """
    table = token_table(model)
    prompt = getattr(table, "prompt", None)
    if prompt is None:
        return
    del table.prompt
    forget = getattr(model, "erase_part_", None)
    if callable(forget) and isinstance(prompt, ExtraEmbeddings):
        forget("prompt", ["embed"], {"length": prompt.weight.shape[0]}, "")


def fold_rows_(model: Any) -> None:
    """Replace a model's P-tuning encoder with the soft-token embeddings that it computes."""
    table = token_table(model)
    prompt = table.prompt
    if isinstance(prompt, PTuningEncoder):
        rows = prompt.weight.detach()
        table.prompt = ExtraEmbeddings(*rows.shape).to(rows)
        with torch.no_grad():
            table.prompt.weight.copy_(rows)
        _remember(model, table.prompt)
