"""Example inputs of small transformers models with any head but a causal language model's.

Models of transformers take images and sound in different input formats. `find_example` tries the
formats in turn, and uses the first that the model accepts and that affects its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmforge.models.transformers.structure import accepted_arguments

__all__ = ["Example", "NoExampleError", "find_example"]

_ROWS, _TEXT, _TARGETS, _GRID = 4, 12, 9, 4
_CLASSIFIERS = ("sequence_classification", "token_classification")
_NO_LOSS = "transformers computes no loss from labels"
_NEEDS_TARGETS = ("fsmt", "pp_formulanet")
_PLACEHOLDERS = (
    "image_token_id", "image_token_index", "audio_token_id", "audio_token_index",
    "media_placeholder_token_id", "image_patch_id", "video_token_index",
)  # fmt: skip


class NoExampleError(ValueError):
    """Raised if a model accepts none of the input formats."""


@dataclass(frozen=True)
class Example:
    """Input of a model, with labels.

    Args:
        inputs: arguments of the model; the first dim of each is a multiple of four rows.
        modality: "text", "image" or "audio".
    """

    inputs: dict[str, Tensor]
    modality: str


def find_example(plain: Any, head: str) -> Example:
    """Return an input for a transformers model, with an image or sound if the model accepts it.

    Args:
        plain: small model, in eval mode.
        head: key of `library.AUTO_CLASSES`.

    Raises:
        NoExampleError: the model accepts none of the input formats.
    """
    reasons = []
    names, _ = accepted_arguments(plain)
    for modality, form in _forms(plain.config, head):
        if not names.issuperset(form):
            continue
        if "input_ids" in names and "attention_mask" in form:  # the mask is that of the text
            continue
        for count in _placeholder_counts(plain, modality, form):
            inputs = {**_text_inputs(plain, head, count, names), **form}
            inputs |= _target_inputs(plain, inputs)
            if form:
                inputs.pop("inputs", None)  # another name of the form's tensor
            if plain.config.model_type == "pp_formulanet":
                inputs.pop("input_ids")  # another name of decoder_input_ids
            try:
                with torch.no_grad():
                    problem = _find_problem(plain, inputs, form)
            except Exception as error:  # any code of transformers may refuse an input
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
                continue
            if not problem:
                return Example(inputs, modality)
            reasons.append(problem)
    # Errors in the code of transformers come first, as other errors may only mean
    # that the input format is wrong.
    reasons.sort(key=lambda reason: not reason.startswith(("AttributeError", _NO_LOSS)))
    raise NoExampleError(
        f"no input form fits a {type(plain).__name__}: {next(iter(reasons), 'it reads none')}"
    )


def _find_problem(plain: Any, inputs: dict[str, Tensor], form: dict[str, Tensor]) -> str:
    """Return the reason why a model cannot be tested with these inputs; "" if there is none.

    The model must return a loss, its logits must depend on the tensors of `form`, and the logits of
    a row must not depend on other rows.
    """
    out = plain(**inputs)
    floats = {name: torch.zeros_like(t) for name, t in form.items() if t.is_floating_point()}
    if out.loss is None:
        return _NO_LOSS
    if not bool(out.logits.isfinite().all()):
        return "its logits are not finite"
    last = plain(**{name: t.chunk(_ROWS)[-1] for name, t in inputs.items()}).logits
    if not torch.allclose(last[0], out.logits[-1], atol=1e-4):
        return "the logits of a row depend on the other rows"
    if floats and torch.equal(plain(**{**inputs, **floats}).logits, out.logits):
        return f"its logits do not depend on {', '.join(floats)}"
    return ""


def _text_inputs(plain: Any, head: str, count: int, names: frozenset[str]) -> dict[str, Tensor]:
    """Return labels, and token ids with `count` image or audio placeholders per sequence."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 150, (_ROWS, _TEXT + count), generator=generator)
    ids[:, -1] = 2  # the end of a text, whose state some classifiers read
    seen = torch.zeros_like(ids)
    seen[:, 2 : 2 + count] = 1
    if count:
        ids = ids.masked_fill(seen.bool(), _placeholder(plain.config))
    if head == "sequence_classification":
        labels = torch.arange(_ROWS) % 2
    elif head == "token_classification":
        labels = ids % 2
    elif _is_encoder_decoder(plain.config):
        labels = torch.randint(5, 150, (_ROWS, _TARGETS), generator=generator)
        labels[0, -3:] = -100
    else:
        labels = ids.masked_fill(seen.bool(), -100)
        labels[0, -4:] = -100
    inputs = {"input_ids": ids, "inputs": ids, "attention_mask": torch.ones_like(ids)}
    if head not in _CLASSIFIERS and count:
        inputs |= {"token_type_ids": seen, "mm_token_type_ids": seen}
    if books := getattr(plain.config, "num_codebooks", 0):  # a text token and codes of sound
        codes = torch.randint(0, 100, (*ids.shape, books), generator=generator)
        inputs["input_ids"] = torch.cat((ids[..., None], codes), 2)
    if "qformer_input_ids" in names:
        inputs["qformer_input_ids"] = ids[:, :_TEXT]
    if "input_ids" in names:
        inputs.pop("inputs")
    elif "inputs" not in names:  # an encoder of images or sound, without a text
        inputs = {}
    return {**{n: t for n, t in inputs.items() if n in names}, "labels": labels}


def _target_inputs(plain: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the decoder's input if the model does not derive it from the labels."""
    if plain.config.model_type not in _NEEDS_TARGETS:
        return {}
    return {"decoder_input_ids": inputs["labels"].roll(1, 1).clamp(min=0)}


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _placeholder(config: Any) -> int | None:
    """Return the id of the token that the features of an image or of sound replace."""
    values = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return next((value for value in values if isinstance(value, int)), None)


def _placeholder_counts(plain: Any, modality: str, form: dict[str, Tensor]) -> Iterator[int]:
    """Yield the numbers of placeholders to try: that of the features if known, else 0 to 64."""
    if modality == "text" or _placeholder(plain.config) is None:
        yield 0
        return
    count = _count_features(plain, modality, form)
    yield from range(65) if count is None else (count,)


def _count_features(plain: Any, modality: str, form: dict[str, Tensor]) -> int | None:
    """Return the number of image or audio features per row; None if they cannot be computed."""
    read = getattr(plain, f"get_{modality}_features", None)
    if read is None:
        return None
    try:
        with torch.no_grad():
            out = read(**form)
    except Exception:  # the model does not accept this form, or reads other arguments
        return None
    features = getattr(out, "pooler_output", None)
    features = out if features is None else features
    parts = [features] if isinstance(features, Tensor) else list(features)
    if not all(isinstance(part, Tensor) for part in parts):
        return None
    width = plain.get_input_embeddings().weight.shape[-1]
    return sum(part.numel() for part in parts) // width // _ROWS


def _forms(config: Any, head: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the input formats to try, as (modality, arguments other than token ids)."""
    torch.manual_seed(0)
    if head == "image_text_to_text":
        yield from (("image", form) for form in _image_forms(config))
    if head in ("sequence_to_sequence", "speech_to_text"):
        yield from (("audio", form) for form in _sound_forms(config))
    yield "text", {}
    boxes = torch.randint(0, 30, (_ROWS, _TEXT, 2)).repeat(1, 1, 2)
    yield "text", {"bbox": boxes}
    yield "text", {"bbox": boxes.repeat(1, 1, 2) / 100}


def _image_forms(config: Any) -> Iterator[dict[str, Tensor]]:
    size, patch = _field(config, "image_size", 32), _field(config, "patch_size", 8)
    temporal = _field(config, "temporal_patch_size", 1)
    pixels, count = torch.randn(_ROWS, 3, size, size), _GRID * _GRID
    sizes = torch.full((_ROWS, 2), size)
    flat = torch.randn(_ROWS * count, 3 * temporal * patch * patch)
    grid = torch.tensor([[1, _GRID, _GRID]] * _ROWS)
    yield {"pixel_values": flat, "image_grid_thw": grid}
    yield {"pixel_values": pixels, "image_sizes": sizes}
    yield {"pixel_values": pixels}
    places = (torch.arange(_TEXT) // 4 == 1).long().expand(_ROWS, -1)
    yield {"pixel_values": pixels, "image_embeds_position_mask": places}
    seen = torch.ones(_ROWS, _TEXT, 1, dtype=torch.int64)
    yield {"pixel_values": pixels[:, None], "image_attention_mask": seen}
    seen = torch.ones(_ROWS, 1, size, size, dtype=torch.int64)
    yield {"pixel_values": pixels[:, None], "pixel_attention_mask": seen}
    yield {"pixel_values": pixels[:, None], "image_sizes": sizes}
    yield {"pixel_values": pixels[:, None]}
    yield {"pixel_values": pixels.unsqueeze(1).repeat(1, 2, 1, 1, 1), "image_sizes": sizes}
    yield {
        "pixel_values": torch.randn(_ROWS, count, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(_ROWS, count, dtype=torch.int64),
        "spatial_shapes": torch.full((_ROWS, 2), _GRID),
    }
    places = torch.cartesian_prod(torch.arange(1, _GRID + 1), torch.arange(1, _GRID + 1))
    width = _field(config, "patch_embed_hidden_size", 3 * patch * patch)
    patches = torch.cat((places.expand(_ROWS, -1, -1), torch.randn(_ROWS, count, width)), 2)
    yield {"flattened_patches": patches, "attention_mask": torch.ones(_ROWS, count)}
    yield {
        "pixel_values": pixels[:, None, None],
        "aspect_ratio_ids": torch.ones(_ROWS, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(_ROWS, 1, 1, dtype=torch.int64),
        "cross_attention_mask": torch.ones(_ROWS, _TEXT, 1, 1, dtype=torch.int64),
    }


def _sound_forms(config: Any) -> Iterator[dict[str, Tensor]]:
    mels = _field(config, "num_mel_bins", 80)
    frames = 2 * _field(config, "max_source_positions", 32)
    for length in dict.fromkeys((frames, 64, 8 * _TEXT, 200)):
        features = torch.randn(_ROWS, mels, length)
        seen = torch.ones(_ROWS, length, dtype=torch.int64)
        for name in ("input_features_mask", "feature_attention_mask"):
            yield {"input_features": features, name: seen}
        yield {"input_features": features}
        for width in dict.fromkeys((mels, 160, 64, _field(config, "input_dim", 80))):
            yield {"input_features": torch.randn(_ROWS, length, width), "input_features_mask": seen}
            yield {"input_features": torch.randn(_ROWS, length, width), "attention_mask": seen}
            yield {"input_features": torch.randn(_ROWS, length, width)}
    yield {"input_values": torch.randn(_ROWS, 4000)}
    yield {"input_values": torch.randn(_ROWS, 1, 4000)}


def _field(config: Any, name: str, default: int) -> int:
    """Return an integer field of a config or nested config; the first entry if it is a list."""
    parts = [v for v in vars(config).values() if hasattr(v, "to_dict")]
    value = getattr(config, name, None) if not parts else None
    for part in parts:
        value = value or getattr(part, name, None)
    value = value or getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) else default
