"""Tests the behavior of an architecture on a small copy of the model, to prevent silent errors.

A config does not show how logits are computed from hidden states, how packed documents can be
separated, whether decoding with the KV cache is exact (also with padding), which layers are never
called, and whether each block passes only one tensor to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.logging import get_logger
from bmforge.models.transformers.calls import (
    ReplacedChild,
    cache_argument,
    call_arguments,
    document_mask,
    hidden_of,
    with_hidden,
    wrap_encoded,
)
from bmforge.models.transformers.small_copy import VOCABULARY, build_small_copy
from bmforge.models.transformers.stages import SplitPoints, find_split_points
from bmforge.models.transformers.structure import Structure, find_structure
from bmforge.models.transformers.weight_use import find_untrained, track_weight_reads
from bmforge.nn.dense_weight import is_conv1d
from bmforge.nn.low_rank import linear_sizes

__all__ = ["Behavior", "general_names", "probe_architecture"]

_TOKENS = 24  # longer than the small copy's sliding window of 16, so that the window has an effect
_ATOL = 1e-4
_ENCODER_HEADS = ("masked_lm", "sequence_classification", "token_classification")


@dataclass(frozen=True)
class Behavior:
    """Observed behavior of an architecture, tested on a small copy of the model.

    Args:
        head: "linear" if logits are the output layer's result times `factor`; "own" if the model
            computes logits separately for each position of the base model's output; otherwise
            "whole".
        factor: factor on the output layer's result.
        packing: how packed documents can be separated: "positions" (by positions that
            restart), "mask" (by a 4-D mask), or "" (not at all).
        caches: True if decoding with the KV cache is exact; if False, every step recomputes the
            whole sequence.
        padding: how to decode left-padded sequences exactly: "mask" (pass a mask at every step),
            "prompt" (pass a mask for the prompt only, with recurrent layers), "whole" (recompute
            the whole sequence at every step), or "" (not possible).
        idle: names (see `general_names`) of the modules that are never called.
        read: general names of the linear layers whose `weight` another module accesses directly,
            or whose forward is not a single product of input and weight.
        untrained: general names of the linear layers that get no gradient.
        split_points: result of `find_split_points`: how the blocks can be split into pipeline
            stages.
        reason: error that prevented the test; "" if the architecture was tested.
    """

    head: str = "whole"
    factor: float = 1.0
    packing: str = ""
    caches: bool = False
    padding: str = "whole"
    idle: frozenset[str] = field(default_factory=frozenset)
    read: frozenset[str] = field(default_factory=frozenset)
    untrained: frozenset[str] = field(default_factory=frozenset)
    split_points: SplitPoints = field(default_factory=SplitPoints)
    reason: str = ""


def general_names(module: nn.Module) -> dict[str, str]:
    """Return a dict from module name to general name, with class names instead of block indices.

    Blocks of the same class behave alike, so these names identify modules in both the model and its
    small copy.
    """
    modules = dict(module.named_modules())

    def generalize(name: str) -> str:
        parts = name.split(".")
        return ".".join(
            type(modules[".".join(parts[: index + 1])]).__name__ if part.isdigit() else part
            for index, part in enumerate(parts)
        )

    return {name: generalize(name) for name in modules}


def probe_architecture(hf_config: Any, head: str) -> Behavior:
    """Build a small copy of a model, and return the observed behavior of its architecture.

    Args:
        hf_config: transformers config of the model; only its sizes are changed.
        head: key of `library.AUTO_CLASSES`. Language models are tested completely, text encoders
            and encoder-decoders only for the use of their layers and, if any, the KV cache, and
            vision-language models only for how they compute logits and use layers for a text.
    """
    untested = Behavior(reason=f"head={head!r} is not tested")
    tested = ("language_model", "sequence_to_sequence", "image_text_to_text", *_ENCODER_HEADS)
    if head not in tested:
        return untested
    try:
        small_copy = build_small_copy(hf_config, head)
        if head == "sequence_to_sequence":
            _, use = _observe_use(small_copy, _text_ids(), decoder_input_ids=_text_ids())
            return replace(untested, caches=_target_cache_matches(small_copy), **use)
        if head in _ENCODER_HEADS:
            return replace(untested, **_observe_use(small_copy, _text_ids())[1])
        if head == "image_text_to_text":
            kind, factor = _find_text_head(small_copy, find_structure(small_copy))
            use = _observe_use(small_copy, _text_ids())[1]
            untrained = use["untrained"] - use["idle"]  # a text does not use the image encoder
            return replace(
                untested, head=kind, factor=factor, read=use["read"], untrained=untrained
            )
        return _probe(small_copy, find_structure(small_copy))
    except Exception as error:  # any code of transformers may fail at small sizes
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        get_logger().info(
            "no small model of model_type=%r can be built: %s", hf_config.model_type, reason
        )
        return Behavior(reason=reason)


def _text_ids() -> Tensor:
    return torch.arange(_TOKENS).mul(37).add(11).remainder(VOCABULARY - 20).add(5)[None]


@torch.no_grad()
def _find_text_head(small_copy: Any, structure: Structure) -> tuple[str, float]:
    """Find out how the logits of a text are computed; see `_find_head`."""
    return _find_head(small_copy, structure, _text_ids(), _run(small_copy, _text_ids()))


@torch.no_grad()
def _probe(small_copy: Any, structure: Structure) -> Behavior:
    ids = _text_ids()
    logits, use = _observe_use(small_copy, ids)
    kind, factor = _find_head(small_copy, structure, ids, logits)
    caches = _continues(small_copy, ids, logits)
    return Behavior(
        kind,
        factor,
        packing=_find_packing(small_copy, ids),
        caches=caches,
        padding=_find_padding(small_copy, ids, caches),
        split_points=find_split_points(small_copy, structure, lambda: _run(small_copy, ids)),
        **use,
    )


@torch.no_grad()
def _observe_use(small_copy: Any, ids: Tensor, **options: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Run a small copy; return its logits and the `Behavior` fields idle, read and untrained."""
    called: set[str] = set()
    general = general_names(small_copy)
    hooks = [
        part.register_forward_pre_hook(_note_call(general[name], called))
        for name, part in small_copy.named_modules()
    ]
    with track_weight_reads(small_copy) as read:
        logits = _run(small_copy, ids, **options)
    for hook in hooks:
        hook.remove()
    if read and _ignores_weight_reads(small_copy, ids, logits, **options):
        read = set()  # T5 reads a dtype, if there is a weight
    return logits, {
        "idle": frozenset(set(general.values()) - called),
        "read": frozenset(general[name] for name in read)
        | _find_unusual(small_copy, ids, **options),
        "untrained": _find_untrained(small_copy, ids, **options),
    }


def _ignores_weight_reads(small_copy: Any, ids: Tensor, logits: Tensor, **options: Tensor) -> bool:
    """Return True if the logits stay the same when other modules read None from `weight`."""
    try:
        with track_weight_reads(small_copy, hidden=True):
            return torch.equal(_run(small_copy, ids, **options), logits)
    except Exception:  # the code of an architecture needs the weights
        return False


def _find_unusual(small_copy: Any, ids: Tensor, **options: Tensor) -> frozenset[str]:
    """Return the general names of linear layers whose output differs from `F.linear`."""
    general, unusual = general_names(small_copy), set()

    def compare(name: str, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        try:
            expected = F.linear(args[0], layer.weight, layer.bias)  # type: ignore[arg-type]
            same = torch.allclose(out, expected, atol=_ATOL)
        except (RuntimeError, TypeError, AttributeError):  # other shapes, or several outputs
            same = False
        if not same:
            unusual.add(general[name])

    hooks = [
        layer.register_forward_hook(partial(compare, name))
        for name, layer in small_copy.named_modules()
        if linear_sizes(layer) is not None
        and type(layer).forward is not nn.Linear.forward
        and not is_conv1d(layer)
    ]
    if hooks:
        _run(small_copy, ids, **options)
    for hook in hooks:
        hook.remove()
    return frozenset(unusual)


def _find_untrained(small_copy: Any, ids: Tensor, **options: Tensor) -> frozenset[str]:
    """Return the general names of the linear layers that get no gradient in any block."""
    try:
        with torch.enable_grad():
            logits = _run(small_copy, ids, **options)
            untrained = find_untrained(small_copy, logits.float().square().sum())
    except RuntimeError:  # the architecture does not support backward
        return frozenset()
    layers = {n for n, m in small_copy.named_modules() if type(m) is nn.Linear}
    general = general_names(small_copy)
    trained = {general[name] for name in layers - untrained}
    return frozenset(general[name] for name in untrained) - trained


def _note_call(name: str, called: set[str]) -> Callable[..., None]:
    return lambda module, args: called.add(name)


def _run(small_copy: Any, ids: Tensor, **options: Any) -> Tensor:
    return small_copy(
        **call_arguments(small_copy, {"input_ids": ids, **options}, cached=False)
    ).logits


def _find_head(
    small_copy: Any, structure: Structure, ids: Tensor, logits: Tensor
) -> tuple[str, float]:
    """Find out how logits are computed; return `Behavior.head` and `Behavior.factor`."""
    if not structure.body:
        return "whole", 1.0
    body = small_copy.get_submodule(structure.body)
    out = body(**call_arguments(body, {"input_ids": ids}, cached=False))
    hidden = hidden_of(out)
    if hidden.shape[:2] != ids.shape:
        return "whole", 1.0
    layer = small_copy.get_submodule(structure.head) if structure.head else None
    if isinstance(layer, nn.Linear) and layer.in_features == hidden.shape[-1]:
        plain = layer(hidden)
        if plain.shape == logits.shape:
            # Least squares: a padding token's row of zeros has logits of 0, without a ratio.
            factor = float((logits * plain).sum() / (plain * plain).sum())
            if torch.allclose(logits, plain * factor, atol=1e-6):
                return "linear", 1.0 if abs(factor - 1) < 1e-5 else factor
    try:
        half = _TOKENS // 2
        part = with_hidden(out, hidden[:, half:])
        with ReplacedChild(small_copy, structure.body, part):
            same = torch.allclose(_run(small_copy, ids[:, half:]), logits[:, half:], atol=1e-5)
    except Exception:  # the model uses more outputs of the body than the hidden states
        same = False
    return ("own" if same else "whole"), 1.0


def _find_packing(small_copy: Any, ids: Tensor) -> str:
    """Return the method that separates packed documents; see `Behavior.packing`."""
    first = 7
    documents = (torch.arange(_TOKENS) >= first).long()[None]
    positions = torch.cat((torch.arange(first), torch.arange(_TOKENS - first)))[None]
    alone = torch.cat((_run(small_copy, ids[:, :first]), _run(small_copy, ids[:, first:])), 1)
    mask = document_mask(documents, torch.float32)
    for kind, mask_options in (("positions", {}), ("mask", {"attention_mask": mask})):
        try:
            packed = _run(small_copy, ids, position_ids=positions, **mask_options)
        except Exception:  # the model does not accept the mask
            continue
        if packed.shape == alone.shape and torch.allclose(packed, alone, atol=_ATOL):
            return kind
    return ""


def _continues(small_copy: Any, ids: Tensor, logits: Tensor) -> bool:
    """Return True if decoding with the KV cache gives the same logits as one forward pass."""
    return _matches_cached(small_copy, ids, logits, None, steps_masked=False)


@torch.no_grad()
def _target_cache_matches(small_copy: Any) -> bool:
    """Return True if an encoder-decoder's cached decoding has the logits of one forward pass."""
    name, past = cache_argument(small_copy), None
    source, target = (torch.arange(_TOKENS).add(n).remainder(VOCABULARY)[None] for n in (5, 40))
    arguments: dict[str, Any] = {"input_ids": source, "decoder_input_ids": target}
    logits = small_copy(**call_arguments(small_copy, arguments, cached=False)).logits
    try:
        for step in range(_TOKENS if name else 0):
            arguments |= {"decoder_input_ids": target[:, step : step + 1], name: past}
            out = small_copy(**call_arguments(small_copy, arguments, cached=True))
            past, hidden = getattr(out, name, None), out.encoder_last_hidden_state
            if past is None or not torch.allclose(out.logits[:, -1], logits[:, step], atol=_ATOL):
                return False
            arguments |= {"encoder_outputs": wrap_encoded(hidden), "input_ids": None}
    except Exception:  # a cache that this version of transformers cannot continue
        return False
    return bool(name)


def _find_padding(small_copy: Any, ids: Tensor, caches: bool) -> str:
    """Find how left-padded sequences are decoded exactly: a value of `Behavior.padding`."""
    first = 5
    alone = _run(small_copy, ids[:, first:])
    padded = ids.clone()
    padded[:, :first] = 0
    mask = (torch.arange(_TOKENS) >= first).long()[None]
    alone = torch.cat((alone.new_zeros(1, first, alone.shape[-1]), alone), 1)
    for kind, steps_masked in (("mask", True), ("prompt", False)) if caches else ():
        if _matches_cached(small_copy, padded, alone, mask, steps_masked=steps_masked):
            return kind
    try:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        batched = _run(small_copy, padded, attention_mask=mask, position_ids=positions)
    except Exception:  # the model does not accept the mask
        return ""
    return "whole" if torch.allclose(batched[:, first:], alone[:, first:], atol=_ATOL) else ""


def _matches_cached(
    small_copy: Any, ids: Tensor, logits: Tensor, mask: Tensor | None, *, steps_masked: bool
) -> bool:
    """Return True if a prompt and two steps with the KV cache give the expected logits.

    Args:
        small_copy: small copy of the model.
        ids: token ids of the prompt and the two steps.
        logits: expected logits at every position.
        mask: 0 for padding on the left, 1 for tokens; None without padding.
        steps_masked: also pass the mask to decoding steps, not only to the prompt.
    """
    name = cache_argument(small_copy)
    if not name:
        return False
    past: Any = None
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    try:
        for start, stop in ((0, _TOKENS - 2), (_TOKENS - 2, _TOKENS - 1), (_TOKENS - 1, _TOKENS)):
            arguments = {"input_ids": ids[:, start:stop], name: past}
            if mask is not None and positions is not None:
                arguments["position_ids"] = positions[:, start:stop]
                arguments["attention_mask"] = mask[:, :stop] if steps_masked or not start else None
            out = small_copy(**call_arguments(small_copy, arguments, cached=True))
            past = getattr(out, name, None)
            if past is None:
                return False
            if not torch.allclose(out.logits[:, -1], logits[:, stop - 1], atol=_ATOL):
                return False
    except Exception:  # a cache that this version of transformers cannot continue
        return False
    return True
