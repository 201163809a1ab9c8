"""Architectures without a native family: the backend equals plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.transformers import TransformersModel
from bmforge.models.transformers.library import config_from_json
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

# One of each kind: windows, soft caps, fused experts, latent attention, recurrence, a hybrid with
# computed buffers, a decoder that does not shift labels, partial rotary with fused q, k and v.
KINDS = (
    "mistral", "gemma2", "glm4_moe", "deepseek_v3", "mamba", "falcon_h1", "bart", "gpt_neox",
)  # fmt: skip
# Kinds that AutoModel opens as a family of its own; the backend opens them on request.
NATIVE_KINDS = ("mistral", "gemma2", "glm4_moe", "deepseek_v3", "gpt_neox")


@dataclass
class Pair:
    """A model of transformers, the same model opened by bmforge, and its directory."""

    kind: str
    plain: Any
    ours: Any
    directory: Path


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 150, (rows, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    plain = build_small_copy(transformers.AutoConfig.for_model(request.param), "language_model")
    plain.generation_config.eos_token_id = None
    plain.generation_config.forced_eos_token_id = None
    plain.save_pretrained(directory)
    ours = AutoModel.from_pretrained(directory, backend="transformers")
    return Pair(request.param, plain, ours, directory)


def test_weights_are_those_of_the_files(pair: Pair, tmp_path: Path) -> None:
    ids = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(pair.ours(ids).logits, pair.plain(input_ids=ids).logits)
    pair.ours.save_pretrained(tmp_path / "saved")
    before = load_file(pair.directory / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, pair.plain(input_ids=ids).logits)


def test_buffers_are_computed(pair: Pair) -> None:
    ours = dict(pair.ours.named_buffers())
    for name, buffer in pair.plain.named_buffers():
        assert torch.equal(ours[name], buffer), name


@pytest.mark.parametrize("num_items", [None, 50.0])
def test_loss_and_gradients(pair: Pair, num_items: float | None) -> None:
    ids = tokens(3, 17, seed=1)
    labels = ids.clone()
    labels[0, :6] = -100
    pair.plain.zero_grad()
    pair.ours.zero_grad()
    logits = pair.plain(input_ids=ids).logits[:, :-1]
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    count = int((labels[:, 1:] != -100).sum()) if num_items is None else num_items
    (total / count).backward()
    loss = pair.ours(ids, labels=labels, num_items_in_batch=num_items).loss
    loss.backward()
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-6)
    wanted = dict(pair.plain.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        if wanted[name].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(
                parameter.grad, wanted[name].grad, rtol=1e-3, atol=2e-6, msg=name
            )


@pytest.mark.parametrize("kind", ["opt", "cohere"])  # opt's code does not call the whole body
def test_loss_with_trained_tokens_of_the_head(kind: str, tmp_path: Path) -> None:
    """The loss is the cross-entropy of the logits, which include the adapter of the head."""
    build_small_copy(transformers.AutoConfig.for_model(kind), "language_model").save_pretrained(
        tmp_path
    )
    ours, ids = AutoModel.from_pretrained(tmp_path, backend="transformers"), tokens(2, 9)
    delta = Lora(ours, targets=["v_proj"], rank=2, trainable_token_indices=ids[0, :3].tolist())
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    loss = ours(ids, labels=ids).loss
    logits = ours(ids).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(want, list(delta.parameters()))
    for got, expected in zip(
        torch.autograd.grad(loss, list(delta.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_packed_rows_equal_their_documents_or_are_refused(pair: Pair) -> None:
    first, second = tokens(1, 9, seed=2), tokens(1, 13, seed=3)
    documents = torch.tensor([[4] * 9 + [7] * 13])
    row = torch.cat((first, second), 1)
    with torch.no_grad():
        alone = torch.cat([pair.plain(input_ids=ids).logits for ids in (first, second)], 1)
        if pair.kind in ("mamba", "falcon_h1"):
            with pytest.raises(ConfigError, match="documents of a packed sequence"):
                pair.ours(row, document_ids=documents)
        elif pair.kind != "bart":
            packed = pair.ours(row, document_ids=documents).logits
            torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(pair: Pair, num_beams: int, padded: bool) -> None:
    """Rows in a batch, padded or not, are continued as each alone by transformers."""
    ids = tokens(2, 8, seed=4)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    ours = generate(pair.ours, ids, mask, max_new_tokens=12, num_beams=num_beams)
    for row, own, left in zip(ids, ours, (mask == 0).sum(1), strict=True):
        alone = row[None, left:]
        plain = pair.plain.generate(
            alone, attention_mask=torch.ones_like(alone), max_new_tokens=12, pad_token_id=0,
            num_beams=num_beams, do_sample=False,
        )  # fmt: skip
        assert torch.equal(own[left:], plain[0])


def test_auto_model_falls_back(pair: Pair) -> None:
    opened = AutoModel.from_pretrained(pair.directory)
    assert isinstance(opened, TransformersModel) == (pair.kind not in NATIVE_KINDS)


def test_native_families_come_first(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    ids = tokens(1, 6) % 90
    native = AutoModel.from_pretrained(tmp_path)
    forced = AutoModel.from_pretrained(tmp_path, backend="transformers")
    assert type(native).__name__ == "Llama"
    with torch.no_grad():
        torch.testing.assert_close(native(ids).logits, forced(ids).logits, rtol=1e-4, atol=1e-5)


def test_messages_name_what_would_open_it() -> None:
    with pytest.raises(ConfigError, match="no native family") as error:
        AutoModel.family_of({"model_type": "jamba"}, backend="native")
    assert "Did you mean 'jamba'" not in str(error.value)
    with pytest.raises(ConfigError, match="neither a native family nor") as error:
        AutoModel.family_of({"model_type": "mistrall"})
    assert "docs/guides/own_models.md" in str(error.value)
    with pytest.raises(ConfigError, match="does not run"):
        AutoModel.family_of({"model_type": "own", "auto_map": {"AutoModel": "m.M"}})
    with pytest.raises(ConfigError, match="unknown backend: backend='other'"):
        AutoModel.family_of({"model_type": "llama"}, backend="other")  # type: ignore[arg-type]


@pytest.mark.skipif(
    "inkling2_loop_text"
    not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    reason="this transformers has no model whose files store computed tensors",
)
def test_a_form_that_transformers_always_saves_is_refused(tmp_path: Path) -> None:
    """The advice is not to save the files again, as transformers has just saved them."""
    kind = transformers.AutoConfig.for_model("inkling2_loop_text")
    build_small_copy(kind, "language_model").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"read in slices.*Use transformers") as error:
        AutoModel.from_pretrained(tmp_path, backend="transformers")
    assert "save it again" not in str(error.value)


def test_a_rejected_config_is_a_config_error() -> None:
    raw = {"model_type": "laguna", "num_hidden_layers": 2, "num_attention_heads_per_layer": [4]}
    with pytest.raises(ConfigError, match="must equal num_hidden_layers"):
        config_from_json(raw)


def test_drawn_weights_do_not_depend_on_the_process(pair: Pair) -> None:
    torch.manual_seed(1)
    one = TransformersModel.from_config(pair.ours.config, seed=3)
    torch.manual_seed(2)
    other = TransformersModel.from_config(pair.ours.config, seed=3)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    with torch.no_grad():
        assert bool(one(tokens(1, 5)).logits.isfinite().all())
