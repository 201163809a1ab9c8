"""Which layers of a quantised model lose most: what each gives, beside what plain weights give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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

# Of one row; what a layer loses is an average over all numbers that it gives.
_MOST_TOKENS = 512


class LayerError(NamedTuple):
    """What a layer loses.

    Attributes:
        name: of the module.
        error: length of what its results are off by, as a share of their length.
    """

    name: str
    error: float


@torch.no_grad()
def measure_layers(source: str, target: str, texts: Sequence[str]) -> list[LayerError]:
    """Return what every packed layer loses on the beginning of some texts, the most first.

    Each layer gets what it gets in the quantised model, so errors do not add up from one layer to
    the next.

    Args:
        source: the model before: a directory, hub id or GGUF file.
        target: the directory of the quantised one.
        texts: files or directories of text.

    Raises:
        DataError: the texts have no token.

    Memory: the quantised model, and of the plain one a tensor at a time.
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
    found = [LayerError(name, losses.error(name)) for name in losses.names]
    return sorted(found, key=lambda one: one.error, reverse=True)


def _first_tokens(tokenizer: Any, texts: Sequence[str], count: int) -> list[int]:
    ids: list[int] = []
    for path in texts:
        for document in read_documents(path):
            ids += tokenizer.encode_plain([document.text])[0]
            if len(ids) >= count:
                return ids[:count]
    if not ids:
        raise DataError(f"{', '.join(texts)}: there is no token in it.")
    return ids


class _Losses:
    """Adds up, by module, squares of results and of what they are off by.

    Args:
        read: reads plain weights.
        known: names of those that there are; a head that is tied has none of its own.
    """

    def __init__(self, read: WeightReader, known: set[str]) -> None:
        self._read, self._known = read, known
        self._off: dict[str, float] = defaultdict(float)
        self._all: dict[str, float] = defaultdict(float)

    @property
    def names(self) -> list[str]:
        """Modules that gave something."""
        return [name for name, total in self._all.items() if total]

    def error(self, name: str) -> float:
        """Return the share that a module's results are off by."""
        return (self._off[name] / self._all[name]) ** 0.5

    def note(self, name: str, multiply: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by a packed matrix, and by the plain one."""
        out: Tensor = multiply(x, bias)
        rows, columns = out.shape[-1], x.shape[-1]
        weight = self._plain(f"{name}.weight", (rows, columns))
        if weight is not None:
            exact = F.linear(x.float(), weight, None if bias is None else bias.float())
            self._add(name, out, exact)
        return out

    def note_stack(self, name: str, multiply: Any, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply by packed experts, and by the plain ones."""
        out: Tensor = multiply(key, x, ends)
        weight = self._plain(f"{name}.{key}", (len(ends), out.shape[-1], x.shape[-1]))
        if weight is not None:
            self._add(name, out, grouped_linear(x.float(), weight, ends))
        return out

    def note_rows(self, name: str, store: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Look rows up in the plain table too; a hook behind a module's forward."""
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
