"""Adapters and quantization on transformers models: every target is called, no expert is left."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.quantize import quantize_directory
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.nn.foreign_experts import PackedForeignExperts, foreign_stacks, is_foreign_experts
from bmforge.nn.packing import find_preset
from bmforge.testing.foreign_layouts import default_config
from bmforge.train import OptimConfig, TrainConfig, Trainer
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

MIXTURES = ("olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "step3p7")


def twin(kind: str) -> Any:
    head = "image_text_to_text" if kind == "step3p7" else "language_model"
    return build_small_copy(default_config(kind), head)


def tokens(rows: int = 2, count: int = 12) -> torch.Tensor:
    return torch.randint(5, 150, (rows, count), generator=torch.Generator().manual_seed(0))


def size_of(model: Any) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("kind", MIXTURES)
def test_int8_packs_experts(kind: str) -> None:
    model, plain = twin(kind), twin(kind)
    before = size_of(model.get_decoder().layers)
    # Activations stay floats, so that the reference is exact.
    quantize_(model, replace(find_preset("int8"), activations="float"))
    packed = [m for m in model.modules() if isinstance(m, PackedForeignExperts)]
    assert packed
    assert not any(is_foreign_experts(module) for module in model.modules())
    assert size_of(model.get_decoder().layers) < 0.5 * before
    # Reference: the plain model whose matrices are the dequantized ones.
    stores = dict(model.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            store: Any = stores[name]
            if isinstance(store, PackedForeignExperts):
                for key, stack in foreign_stacks(module).items():
                    dense = store.plain(key)
                    is_transposed = getattr(module, "is_transposed", False)
                    stack.copy_(dense.transpose(1, 2) if is_transposed else dense)
            elif hasattr(store, "packed"):
                module.weight.copy_(store.plain("weight"))
        wanted, got = plain(input_ids=tokens()).logits, model(input_ids=tokens()).logits
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_packed_experts_pass_gradients_on() -> None:
    model, plain = twin("gpt_oss"), twin("gpt_oss")
    quantize_(model, "int8")
    Lora(model, targets=["all-linear"], rank=2)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)
    assert any(bool(p.grad.any()) for p in trained if p.grad is not None)
    assert size_of(plain) > size_of(model)


def test_quantized_directory_opens_again(tmp_path: Path) -> None:
    twin("olmoe").save_pretrained(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "int8", "int8")
    whole = AutoModel.from_pretrained(tmp_path / "plain")
    opened = AutoModel.from_pretrained(tmp_path / "int8")
    quantize_(whole, "int8")
    with torch.no_grad():
        assert torch.equal(opened(tokens()).logits, whole(tokens()).logits)


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_a_quantized_directory_decodes_with_the_cache(kind: str, tmp_path: Path) -> None:
    """Its architecture is tested as that of the plain model, although it is built on meta."""
    twin(kind).save_pretrained(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "int8", "int8")
    plain = AutoModel.from_pretrained(tmp_path / "plain", backend="transformers")
    quantized = AutoModel.from_pretrained(tmp_path / "int8")
    assert quantized.behavior == plain.behavior
    assert quantized.behavior.caches


def test_what_stays_float_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = twin("granitemoe")
    with caplog.at_level(logging.WARNING, logger="bmforge"):
        quantize_(model, "int8")
    left = [r.getMessage() for r in caplog.records if "are not quantized" in r.getMessage()]
    assert left or any(isinstance(m, PackedForeignExperts) for m in model.modules())


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba"])
def test_uncalled_modules_are_no_targets(kind: str) -> None:
    model = twin(kind)
    with pytest.raises(ConfigError, match=r"dt_proj without calling"):
        Lora(model, targets=["in_proj", "dt_proj"], rank=4)
    Lora(model, targets="all-linear", rank=4)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_uncalled_modules_are_not_packed() -> None:
    model = quantize_(twin("mamba"), "int8")
    with torch.no_grad():
        assert bool(model(input_ids=tokens()).logits.isfinite().all())
    with pytest.raises(ConfigError, match="without calling"):
        quantize_(twin("mamba"), "int8", where=["**.dt_proj"])


# Sparse attention chooses tokens through a layer without a gradient; a decoder with cross-attention
# blocks leaves these out for a row of text.
@pytest.mark.parametrize("kind", ["deepseek_v32", pytest.param("mllama", marks=pytest.mark.long)])
def test_layers_without_a_gradient_are_no_targets(kind: str, tmp_path: Path) -> None:
    twin(kind).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, backend="transformers")
    Lora(model, targets=["all-linear"], rank=2)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)


def test_a_target_without_a_gradient_is_refused(tmp_path: Path) -> None:
    twin("deepseek_v32").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, backend="transformers")
    with pytest.raises(ConfigError, match=r"no gradient to .*indexer\.wk"):
        Lora(model, targets=["indexer.wk"], rank=2)


@pytest.mark.parametrize(
    "kind", ["hunyuan_v1_moe", pytest.param("deepseek_v32", marks=pytest.mark.long)]
)
def test_weights_that_other_modules_read_stay_floats(kind: str, tmp_path: Path) -> None:
    twin(kind).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, backend="transformers")
    read = model.read_outside(dict(model.named_modules()))
    assert read
    quantize_(model, "int8")
    assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in read)
    with torch.no_grad():
        assert bool(model(tokens()).logits.isfinite().all())
    again = AutoModel.from_pretrained(tmp_path, backend="transformers")
    with pytest.raises(ConfigError, match="other modules use"):
        quantize_(again, "int8", where=[read[0]])


def test_a_word_without_a_layer_lists_the_layers() -> None:
    with pytest.raises(ConfigError) as error:
        Lora(twin("mamba"), targets=["attn.q"], rank=4)
    assert "Did you mean 'attn.q'" not in str(error.value)
    assert "in_proj, out_proj, x_proj" in str(error.value)


def test_a_loss_that_ignores_the_number_of_items_is_refused(tmp_path: Path) -> None:
    plain = twin("bart")
    with pytest.raises(ConfigError, match="ignores num_items_in_batch"):
        Trainer(plain, _Rows([]), TrainConfig(steps=1))
    plain.save_pretrained(tmp_path)
    losses = []
    for count in (1, 2):
        model = AutoModel.from_pretrained(tmp_path)
        rows = tokens(2).split(2 // count)
        _fit(model, [{"input_ids": row, "labels": row} for row in rows], losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


class _Rows:
    def __init__(self, micro_batches: list[Any]) -> None:
        self.micro_batches = micro_batches

    def __next__(self) -> list[Any]:
        return self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _fit(model: Any, micro_batches: list[Any], losses: list[float]) -> None:
    config = TrainConfig(steps=1, optim=OptimConfig(lr=1e-3))
    note = [lambda trainer, row: losses.append(row["loss"])]
    Trainer(model, _Rows(micro_batches), config, callbacks=note).fit()
