"""Writes quantized models in vLLM's compressed-tensors format; see `compressed_tensors.py`.

transformers and vLLM can load the result. Quantized linear layers of blocks are written as
integers; other quantized modules (embedding, head) are dequantized to floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models.formats.compressed_tensors import (
    INT_FORMAT,
    METHOD,
    PACKED_FORMAT,
    pack_words,
)
from bmforge.models.formats.hf_format import has_weights, plan_files, write_file, write_index
from bmforge.models.weights import (
    OWN_PREFIX,
    PACKED_KEYS,
    assemble_source,
    group_by_source,
)
from bmforge.nn.head import LMHead
from bmforge.nn.packed_store import MatrixStore
from bmforge.nn.packing import PackedMatrix, QuantSpec, unpack_values
from bmforge.nn.quantized import QuantizedExperts, QuantizedLinear
from bmforge.provenance import write_provenance
from bmforge.surgery import persistent_tensors

__all__ = ["check_compressed", "save_compressed"]

# Families that keep the names of the original checkpoints, for which neither library has a class.
_WITHOUT_READERS = ("CPM1", "CPM2", "CPMAnt", "CPMBee", "EVA", "GLM")

# Families whose modules transformers 5 renames while loading. It matches weight-only schemes with
# the tensor names in the file, but schemes that quantize activations with the module names.
_RENAMED_MODULES = ("ViT",)


def save_compressed(
    model: Any, directory: str | Path, *, overwrite: bool = False, max_file_bytes: int = 4 << 30
) -> Path:
    """Write a quantized model in a format that transformers and vLLM load; return the directory.

    Args:
        model: bmforge model in one process, with quantized layers (`quantize`). Layers with one
            scale per row and int8 activations are written with dynamic 8-bit activations (one
            scale per token); all others with weight-only quantization, equivalent to
            ``activations="float"``.
        directory: output directory; created if it does not exist.
        overwrite: replace existing weights.
        max_file_bytes: maximum file size; larger weights are split over several files.

    Raises:
        ConfigError: nothing is quantized, or the format does not support the scheme or family.
        CheckpointError: the directory already has weights and `overwrite` is off.
    """
    out = Path(directory)
    if has_weights(out) and not overwrite:
        raise CheckpointError(
            f"{str(out)!r} already contains a model. Choose another directory, or pass "
            "overwrite=True."
        )
    source = _Source(model)
    spec = _check(model, source.stems)
    out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    homes: dict[str, str] = {}
    for source_name in source.names():
        tensors = source.read(source_name)
        sizes |= {name: t.numel() * t.element_size() for name, t in tensors.items()}
        homes |= dict.fromkeys(tensors, source_name)
    plan = plan_files(sizes, max_file_bytes)
    for file, names in plan.items():
        collected: dict[str, Tensor] = {}
        for source_name in dict.fromkeys(homes[name] for name in names):
            collected |= {name: t for name, t in source.read(source_name).items() if name in names}
        write_file(out / file, collected)
    _write_config(model, out, source.stems, spec)
    write_provenance(out, model.provenance)
    write_index(out, plan, sum(sizes.values()))
    return out


def check_compressed(model: Any) -> None:
    """Raise `ConfigError` if the format cannot represent the model; the meta device suffices."""
    _check(model, _Source(model).stems)


class _Source:
    """Converts a model to compressed-tensors, one packed layer or one other tensor at a time.

    Attributes:
        stems: mapping from the module name of each packed layer to its Hugging Face name.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._tensors = model, persistent_tensors(model)
        self._groups = group_by_source(model.active_rules())
        self.stems: dict[str, str] = {}
        for published, rules in self._groups.items():
            owner, _, key = rules[0].parameter.rpartition(".")
            if key == "packed":
                self.stems[owner] = published.removesuffix(".packed")

    def names(self) -> list[str]:
        """Return the names of packed layers, and the Hugging Face names of all other tensors."""
        names: dict[str, None] = {}
        for published, rules in self._groups.items():
            owner, _, key = rules[0].parameter.rpartition(".")
            names[owner if owner in self.stems and key in PACKED_KEYS else published] = None
        return list(names)

    def read(self, source_name: str) -> dict[str, Tensor]:
        """Return the tensors to store for a name in `names`, as a dict from name to tensor."""
        if source_name not in self.stems:
            rules = self._groups[source_name]
            tensor = assemble_source(rules, lambda name: self._tensors[name].detach())
            return {source_name: tensor.cpu()}
        store, stem = self._model.get_submodule(source_name), self.stems[source_name]
        if not isinstance(store, QuantizedLinear):
            return {f"{stem}.weight": store.dense(store.like.dtype).cpu()}
        return dict(_tensors_of(store, stem))


def _check(model: Any, stems: dict[str, str]) -> QuantSpec:
    """Validate the model; return the quantization scheme that its linear layers share."""
    problems: list[str] = []
    if type(model).__name__ in _WITHOUT_READERS:
        problems.append(f"neither transformers nor vLLM supports a {type(model).__name__}")
    specs: dict[QuantSpec, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            problems.append(
                f"{name}: the experts are stacked in this model, but the format stores single "
                "layers"
            )
        elif isinstance(module, QuantizedLinear):
            specs.setdefault(module.spec, name)
            if stems[name].startswith(OWN_PREFIX):
                problems.append(
                    f"{name} is part of a fused or transposed tensor in the files of this family"
                )
            problems += [f"{name} {problem}" for problem in _storage_problems(module)]
            if type(model).__name__ in _RENAMED_MODULES and _form_of(module.spec)[2]:
                problems.append(
                    f"{name} has row-wise weights for 8-bit activations, but transformers "
                    f"uses other module names for a {type(model).__name__} than its files"
                )
            if _form_of(module.spec) == (4, 0, True):
                problems.append(
                    f"{name} has row-wise 4-bit weights for 8-bit activations, but the "
                    'format supports 4 bits for weights only (activations="float")'
                )
    if not specs:
        raise ConfigError(
            f"{type(model).__name__} has no quantized linear layers. Quantize it first, for "
            'example with compress.quantize(model, "int8-dynamic").'
        )
    if len({(_form_of(spec), spec.symmetric) for spec in specs}) > 1:
        problems.append(f"the layers have several schemes ({' and '.join(specs.values())})")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(
            f"the format {METHOD} does not support this model: {'; '.join(problems[:3])}{more}. "
            "Save it with save_pretrained, or quantize it with another scheme."
        )
    return next(iter(specs))


def _storage_problems(store: QuantizedLinear) -> list[str]:
    """Return an error message for each feature of a packed layer that the format lacks."""
    spec, problems = store.spec, []
    if spec.outlier_ratio:
        problems.append("has outlier columns in 16 bits")
    if spec.symmetric:
        return problems
    if not spec.group_size and spec.activations == "int8":
        problems.append('has asymmetric weights for 8-bit activations (use activations="float")')
    is_on_meta = any(t is not None and t.is_meta for t in store._tensors())
    if spec.scale_dtype == "float16" or (not is_on_meta and find_zero_points(store) is None):
        problems.append("has minima that are not integer zero points")
    return problems


def find_zero_points(store: MatrixStore) -> Tensor | None:
    """Return the integer zero points of an asymmetric layer, or None if some are not integers.

    Shape:
        returns (rows, groups), in the range of the stored integers
    """
    matrix = PackedMatrix(*store._tensors())  # type: ignore[arg-type]
    assert matrix.minima is not None
    scales = matrix.scales.float()
    zeros = (-matrix.minima.float() / scales.where(scales > 0, 1.0)).round()
    if not torch.equal(zeros * -scales, matrix.minima.float()):
        return None
    return zeros.transpose(1, 2).flatten(0, 1)[: store.rows].cpu()


def _form_of(spec: QuantSpec) -> tuple[int, int, bool]:
    """Return the bits, the group size, and True for int8 activations with a scale per row."""
    return spec.bits, spec.group_size, not spec.group_size and spec.activations == "int8"


def _tensors_of(store: MatrixStore, stem: str) -> Iterator[tuple[str, Tensor]]:
    matrix = PackedMatrix(*(None if t is None else t.cpu() for t in store._tensors()))  # type: ignore[arg-type]
    values = unpack_values(matrix.packed, store.spec)[: store.rows]
    scales = matrix.scales.float().transpose(1, 2).flatten(0, 1)[: store.rows].contiguous()
    if _form_of(store.spec) == (8, 0, True):
        yield f"{stem}.weight", values.contiguous()
    else:
        signed = values - 8 if store.spec.bits == 4 and not store.spec.symmetric else values
        yield f"{stem}.weight_packed", pack_words(signed, store.spec.bits)
        if not store.spec.symmetric:
            zeros = find_zero_points(store)
            assert zeros is not None
            signed = (zeros - (8 if store.spec.bits == 4 else 0)).to(torch.int8)
            words = pack_words(signed.t(), store.spec.bits).t().contiguous()
            yield f"{stem}.weight_zero_point", words
        yield f"{stem}.weight_shape", torch.tensor([store.rows, store.columns])
    yield f"{stem}.weight_scale", scales


def _write_config(model: Any, out: Path, stems: dict[str, str], spec: QuantSpec) -> None:
    others = tuple(change for change in model.config.changes if change.kind != "quantize")
    config = model.config.replace(changes=others).to_hf()
    floats = (t.dtype for t in persistent_tensors(model).values() if t.is_floating_point())
    config["dtype"] = str(next(floats, torch.float32)).removeprefix("torch.")
    config.pop("torch_dtype", None)
    linear = [stems[n] for n, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    modules = [rule.source.rpartition(".")[0] for rule in model.active_rules()]
    heads = [stems.get(n, n) for n, m in model.named_modules() if isinstance(m, LMHead)]
    is_rows = _form_of(spec) == (8, 0, True)
    weights = {"num_bits": spec.bits, "type": "int", "symmetric": spec.symmetric, "dynamic": False}
    weights |= (
        {"strategy": "channel"}
        if not spec.group_size
        else {
            "strategy": "group",
            "group_size": spec.group_size,
        }
    )
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format": INT_FORMAT if is_rows else PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": _as_targets(linear, modules),
                "weights": weights,
                "input_activations": tokens if is_rows else None,
                "output_activations": None,
            }
        },
        "ignore": heads,
    }
    if not is_rows:
        # With this field, transformers unpacks the weights while loading. Without it, transformers
        # 5.24 expects unpacked zero points, and T5's MLP accesses an unpacked weight.
        config["quantization_config"]["dequantize"] = True
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def _as_targets(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return a short list of regex targets that match exactly these Hugging Face names."""
    patterns: dict[str, None] = {}
    for name in names:
        pattern = re.escape(re.sub(r"\.\d+(?=\.)", ".#", name)).replace(r"\#", r"\d+")
        fits = all(other in names for other in modules if re.fullmatch(pattern, other))
        patterns[f"re:^{pattern if fits else re.escape(name)}$"] = None
    return list(patterns)
