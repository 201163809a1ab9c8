"""Importance scores of heads, MLP features, sublayers, blocks and hidden features.

| `by` | score | needs batches |
|---|---|---|
| "size" | norm of the unit's weights | no |
| "activation" | norm of the unit's contribution to the residual stream, over tokens | yes |
| "taylor" | first-order estimate of the loss change if the unit is removed | with labels |
| "influence" | sublayers, blocks: change of hidden states' direction; others: activation | yes |

Source: Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019): the square of
activation times gradient; Men et al., "ShortGPT" (2024): block influence; Muralidharan et al.,
"Minitron" (2024): activations as importance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.compress.prune.block_hooks import blend_part_, scale_input_
from bmforge.compress.prune.plan import blocks_of
from bmforge.errors import ConfigError, suggest
from bmforge.nn import MLP, Block, MoESpec
from bmforge.nn.gates import HardConcrete

__all__ = ["By", "Scores", "measure_importance"]

By = Literal["size", "activation", "taylor", "influence"]
# (block name, or "" for the whole model; kind) -> one score per unit. Kinds: "heads",
# "cross_heads" (N,); "query_dims", "value_dims" (K, H); "features" (F,) or (E, F); "experts" (E,);
# "attn", "mlp", "block" (1,); "hidden" (D,).
Scores = dict[tuple[str, str], Tensor]


def measure_importance(model: Any, batches: Iterable[Any] = (), by: By = "size") -> Scores:
    """Return a dict with the importance scores of all units of a model.

    Args:
        model: bmforge model of any family, already in the mode (training or evaluation) to measure
            in; its weights are unchanged.
        batches: keyword arguments of the model's forward, or only token ids; with labels for
            "taylor".
        by: importance measure; see the table in the module's docstring (default: "size").

    Raises:
        ConfigError: the measure is unknown, or needs batches, which are missing or empty.
    """
    if by not in get_args(By):
        raise ConfigError(
            f"unknown importance: by={by!r} (supported: "
            f"{', '.join(get_args(By))}).{suggest(by, get_args(By))}"
        )
    blocks = blocks_of(model)
    scores = _sizes(model, blocks)
    if by == "size":
        return scores
    batches = list(batches)
    if not batches:
        raise ConfigError(
            f"by={by!r} needs calibration batches. Pass batches, or use by='size', which needs "
            "none."
        )
    probes = _Probes(blocks, by == "taylor")
    with probes.attached(model):
        for batch in prepare_batches(model, batches):
            probes.run(model, batch)
    return scores | probes.scores(by)


def _sizes(model: Any, blocks: Mapping[str, Block]) -> Scores:
    scores: Scores = {}
    for name, block in blocks.items():
        for part, what in (("attn", "heads"), ("cross_attn", "cross_heads")):
            attn: Any = getattr(block, part)
            if attn is None:
                continue
            spec = getattr(block.spec, part)
            query, key, value, out = (_squares(attn, f"{p}_proj", p == "o") for p in "qkvo")
            asks = (query + out).view(spec.num_kv_heads, -1, spec.head_dim)
            answers = (key + value).view(spec.num_kv_heads, 1, spec.head_dim)
            scores[name, what] = (asks + answers).sum(-1).flatten().sqrt()
            if part == "attn" or block.attn is None:
                per_head = (spec.num_kv_heads, -1, spec.head_dim)
                query_sizes = query.view(per_head).sum(1) + key.view(per_head).sum(1)
                value_sizes = out.view(per_head).sum(1) + value.view(per_head).sum(1)
                scores[name, "query_dims"], scores[name, "value_dims"] = (
                    query_sizes.sqrt(),
                    value_sizes.sqrt(),
                )
        if block.mlp is not None:
            features = _feature_sizes(block)
            scores[name, "features"] = features
            if isinstance(block.spec.mlp, MoESpec):
                scores[name, "experts"] = features.square().sum(1).sqrt()
            scores[name, "mlp"] = features.square().sum().sqrt().view(1)
        if block.attn is not None:
            scores[name, "attn"] = scores[name, "heads"].square().sum().sqrt().view(1)
        weights = [p.detach().float().square().sum() for p in block.parameters()]
        scores[name, "block"] = sum(weights, torch.zeros(())).sqrt().view(1)
    scores["", "hidden"] = _hidden_sizes(model, blocks)
    return scores


def _hidden_sizes(model: Any, blocks: Mapping[str, Block]) -> Tensor:
    """Return, for each hidden feature, the norm of the weights that write to it."""
    width = model.config.hidden_size
    table: Any = getattr(model, "embed", None)
    total = torch.zeros(width)
    if isinstance(table, nn.Embedding) and table.weight.shape[1] == width:
        total = table.weight.detach().float().square().sum(0)
    for block in blocks.values():
        for part, key in (("attn", "o_proj"), ("cross_attn", "o_proj"), ("mlp", "down_proj")):
            module = getattr(block, part)
            if hasattr(module, "experts"):
                total = total + module.experts.down_proj.detach().float().square().sum((0, 2))
            elif module is not None:
                total = total + _squares(module, key)
    return total.sqrt()


def _squares(module: nn.Module, key: str, inputs: bool = False) -> Tensor:
    """Return the sum of squares of every row (if `inputs`, column) of a linear layer's weight."""
    weight = getattr(module, key).weight.detach().float()
    sums: Tensor = weight.square().sum(0 if inputs else 1)
    return sums


def _feature_sizes(block: Block) -> Tensor:
    mlp: Any = block.mlp
    if isinstance(block.spec.mlp, MoESpec):
        stacks = [(mlp.experts.up_proj, 2), (mlp.experts.gate_proj, 2), (mlp.experts.down_proj, 1)]
        parts = [s.detach().float().square().sum(dim) for s, dim in stacks if s is not None]
    else:
        parts = [_squares(mlp, "up_proj"), _squares(mlp, "down_proj", True)]
        parts += [] if mlp.gate_proj is None else [_squares(mlp, "gate_proj")]
    return torch.stack(parts).sum(0).sqrt()


def _last_layers(block: Block) -> dict[str, nn.Module]:
    """Return the last linear layer of each sublayer, whose inputs are heads or MLP features."""
    attentions = {"attn": block.attn, "cross": block.cross_attn}
    layers = {key: attn.o_proj for key, attn in attentions.items() if attn is not None}
    return layers | ({"mlp": block.mlp.down_proj} if isinstance(block.mlp, MLP) else {})


class _Probes:
    """Probes that record statistics of batches at the modules to which gates would be attached.

    Args:
        blocks: dict from name to block of the model.
        wants_gradient: record gradients as well.
    """

    def __init__(self, blocks: Mapping[str, Block], wants_gradient: bool) -> None:
        self.blocks, self.wants_gradient = blocks, wants_gradient
        self.seen: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.scales: list[tuple[tuple[str, str], Tensor]] = []

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Context manager: attach the probes to the blocks, and remove them at the end."""
        if any(isinstance(module, HardConcrete) for module in model.modules()):
            raise ConfigError(
                f"the {type(model).__name__} already has gates. Measure the importance before the "
                "gates are added."
            )
        with ExitStack() as undo:
            for name, block in self.blocks.items():
                for key, part in (("block", block), ("attn", block.attn), ("mlp", block.mlp)):
                    if part is not None:
                        note_part = partial(self._note_part, (name, key))
                        undo.callback(blend_part_(block, key, note_part))
                for key, layer in _last_layers(block).items():
                    note_units = partial(self._note_units, (name, f"{key}.units"))
                    undo.callback(scale_input_(layer, note_units).remove)
            yield

    def run(self, model: Any, batch: Mapping[str, Any]) -> None:
        """Run one batch through the model."""
        if not self.wants_gradient:
            with torch.no_grad():
                model(**batch)
            return
        loss = model(**batch).loss
        if loss is None:
            raise ConfigError(
                "by='taylor' needs a loss, but the model returned none. Pass batches with labels."
            )
        keys, scales = zip(*self.scales, strict=True)
        for key, grad in zip(
            keys, torch.autograd.grad(loss, scales, allow_unused=True), strict=True
        ):
            if grad is not None:
                self._add(key, grad.float().square(), 1)
        self.scales.clear()

    def _add(self, key: tuple[str, str], total: Tensor, count: int) -> None:
        """Add `total`, which is a sum over `count` tokens or the value of one batch, to a score."""
        self.seen[key] = self.seen[key] + total if key in self.seen else total
        self.counts[key] = self.counts.get(key, 0) + count

    def _note_units(self, key: tuple[str, str], x: Tensor) -> Tensor:
        if not self.wants_gradient:
            squares = x.detach().float().square().flatten(0, -2)
            self._add(key, squares.sum(0), squares.shape[0])
            return x
        scale = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
        self.scales.append((key, scale))
        return x * scale

    def _note_part(self, key: tuple[str, str], before: Tensor, after: Tensor) -> Tensor:
        if not self.wants_gradient:
            added = (after - before).float().norm(dim=-1).sum()
            count = before.shape[:-1].numel()
            turn = (1 - torch.cosine_similarity(before.float(), after.float(), -1)).sum()
            # In parallel blocks `before` is 0 and has no direction, so use the norm of the
            # addition.
            turn = turn if before.any() else added
            self._add((key[0], f"{key[1]}.turn"), turn.view(1), count)
            self._add((key[0], f"{key[1]}.size"), added.view(1), count)
            if key[1] == "block":
                sizes = after.detach().float().abs().flatten(0, -2).sum(0)
                self._add(("", "hidden"), sizes, count)
            return after
        scale = torch.ones(1, dtype=after.dtype, device=after.device, requires_grad=True)
        self.scales.append((key, scale))
        return before + scale * (after - before)

    def scores(self, by: By) -> Scores:
        """Return the importance of each unit, averaged over tokens (gradients: over batches)."""
        scores: Scores = {}
        for (name, what), total in self.seen.items():
            mean = total / self.counts[name, what]
            if what.endswith(".units"):
                scores |= self._unit_scores(name, what, mean)
            elif what in ("hidden",) or self.wants_gradient:
                scores[name, what] = mean
            elif what.endswith(".turn" if by == "influence" else ".size"):
                scores[name, what.partition(".")[0]] = mean
        return scores

    def _unit_scores(self, name: str, what: str, mean: Tensor) -> Scores:
        """Return scores of heads, head dims or features from mean inputs of the projection."""
        block = self.blocks[name]
        if what == "mlp.units":
            mlp: Any = block.mlp
            mean = mean if self.wants_gradient else mean * _squares(mlp, "down_proj", True)
            return {(name, "features"): mean if self.wants_gradient else mean.sqrt()}
        part, key = ("attn", "heads") if what == "attn.units" else ("cross_attn", "cross_heads")
        spec = getattr(block.spec, part)
        if not self.wants_gradient:
            mean = mean * _squares(getattr(block, part), "o_proj", True)
        units = mean.view(spec.num_kv_heads, -1, spec.head_dim)
        scores: Scores = {(name, key): units.sum(-1).flatten()}
        if part == "attn" or block.attn is None:
            scores[name, "value_dims"] = units.sum(1)
        return scores
