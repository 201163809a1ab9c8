"""Measures the quantization error of each layer: the relative error of the layer's outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.data.clean.normalize import normalize_documents
from bmforge.data.sources.files import read_documents
from bmforge.errors import DataError
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.models.load import WeightReader, weight_reader
from bmforge.nn.grouped import grouped_linear
from bmforge.nn.quantized import MatrixStore, QuantizedEmbedding, QuantizedExperts
from bmforge.surgery import persistent_tensors
from bmforge.tokenizers import AutoTokenizer

__all__ = ["LayerError", "measure_layers"]

# Sequence length in tokens; a layer's error is averaged over all of its outputs.
_MOST_TOKENS = 512


class LayerError(NamedTuple):
    """Quantization error of one layer.

    Attributes:
        name: name of the module.
        error: relative L2 error of its outputs.
    """

    name: str
    error: float


@torch.no_grad()
def measure_layers(source: str, target: str, texts: Sequence[str]) -> list[LayerError]:
    """Measure the quantization error of every quantized layer; largest error first.

    Both versions of a layer get the same input, that of the quantized model, so errors do not
    accumulate from layer to layer. Only the beginning of the texts is used.

    Args:
        source: the original model: a directory, hub id or GGUF file.
        target: directory of the quantized model.
        texts: files or directories of text.

    Raises:
        DataError: the texts have no tokens.

    Memory: the quantized model and one tensor of the original model.
    """
    plain, files = AutoModel.describe_pretrained(find_model(source), dtype=torch.float32)
    losses = _Losses(weight_reader(plain, files), {*persistent_tensors(plain)})
    model = AutoModel.from_pretrained(target).eval()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedEmbedding):
            module.register_forward_hook(partial(losses.note_rows, name))
        elif isinstance(module, (MatrixStore, QuantizedExperts)):
            loss = losses.note_stack if isinstance(module, QuantizedExperts) else losses.note
            module.multiply = partial(loss, name, module.multiply)  # type: ignore[method-assign]
    longest = model.traits.row_limit(model.config) or _MOST_TOKENS
    ids = _first_tokens(AutoTokenizer.from_pretrained(target), texts, min(longest, _MOST_TOKENS))
    model(input_ids=torch.tensor([ids]))
    errors = [LayerError(name, losses.error(name)) for name in losses.names]
    return sorted(errors, key=lambda error: error.error, reverse=True)


def _first_tokens(tokenizer: Any, texts: Sequence[str], count: int) -> list[int]:
    ids: list[int] = []
    for path in texts:
        for document in normalize_documents(read_documents(path)):
            ids += tokenizer.encode_plain([document.text])[0]
            if len(ids) >= count:
                return ids[:count]
    if not ids:
        raise DataError(
            f"the files {', '.join(texts)} contain no token. Use files with at least one text."
        )
    return ids


class _Losses:
    """Accumulates the squared outputs, and squared output errors, of each module.

    Args:
        read: function that reads original weights.
        packed_names: original names of the quantized weights; others, such as a tied head, are
            not measured.
    """

    def __init__(self, read: WeightReader, packed_names: set[str]) -> None:
        self._read, self._known = read, packed_names
        self._off: dict[str, float] = defaultdict(float)
        self._all: dict[str, float] = defaultdict(float)

    @property
    def names(self) -> list[str]:
        """Names of the modules with nonzero outputs."""
        return [name for name, total in self._all.items() if total]

    def error(self, name: str) -> float:
        """Return the relative L2 error of a module's outputs."""
        return (self._off[name] / self._all[name]) ** 0.5

    def note(self, name: str, multiply: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by a packed matrix, and record the error against the original matrix."""
        out: Tensor = multiply(x, bias)
        rows, columns = out.shape[-1], x.shape[-1]
        weight = self._plain(f"{name}.weight", (rows, columns))
        if weight is not None:
            exact = F.linear(x.float(), weight, None if bias is None else bias.float())
            self._add(name, out, exact)
        return out

    def note_stack(self, name: str, multiply: Any, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply by packed experts, and record the error against the original experts."""
        out: Tensor = multiply(key, x, ends)
        weight = self._plain(f"{name}.{key}", (len(ends), out.shape[-1], x.shape[-1]))
        if weight is not None:
            self._add(name, out, grouped_linear(x.float(), weight, ends))
        return out

    def note_rows(self, name: str, store: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Forward hook of a quantized embedding: record the error of the looked-up rows."""
        weight = self._plain(f"{name}.weight", (store.rows, store.columns))
        if weight is not None:
            self._add(name, out, weight[args[0]])

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name not in self._known:
            return None
        weight = torch.empty(shape)
        self._read(name, weight)
        return weight

    def _add(self, name: str, out: Tensor, exact: Tensor) -> None:
        self._off[name] += float((out.float() - exact).double().square().sum())
        self._all[name] += float(exact.double().square().sum())
