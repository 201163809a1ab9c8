"""Modules of a ModelCenter model by the original's names: reading and hooks."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.model import GPT2, Bert, BertConfig, GPT2Config, ViT, VitConfig
from bmforge.parallel import shutdown_distributed

SIZES = {"vocab_size": 24, "dim_model": 16, "num_heads": 2, "dim_head": 8, "dim_ff": 32}


@pytest.mark.parametrize(("kind", "config"), [(Bert, BertConfig), (GPT2, GPT2Config)])
def test_the_embedding_by_its_old_name(kind, config) -> None:
    model = kind(config(**SIZES, num_layers=1, dropout_p=0.0)).eval()
    embedding = model._modules["input_embedding"]
    assert embedding.weight is model.input_embedding.weight
    gradients = []
    embedding.register_full_backward_hook(lambda module, into, out: gradients.append(out[0]))
    ids = torch.tensor([[3, 4, 3]])
    model(input_ids=ids, length=torch.tensor([3]), output_logits=True).logits.sin().sum().backward()
    # The gradient of a row is the sum over its places, if nothing else uses the table.
    got = torch.zeros_like(embedding.weight).index_add(0, ids[0], gradients[0][0])
    others = [row for row in range(24) if row not in (3, 4)]
    assert gradients[0].shape == (1, 3, 16)
    assert not got[others].any()
    assert got[[3, 4]].any()


def test_names_stay_those_of_the_model() -> None:
    model = Bert(BertConfig(**SIZES, num_layers=1))
    names = [name for name, _ in model.named_modules()]
    _ = model._modules["input_embedding"]
    assert [name for name, _ in model.named_modules()] == names
    assert copy.deepcopy(model)._modules["input_embedding"] is not model.model.embed
    with pytest.raises(KeyError, match="never_there"):
        model._modules["never_there"]


def test_the_patch_embedding_of_vit() -> None:
    sizes = {"img_size": 16, "patch_size": 8, "num_classes": 3, "hidden_size": 16, "mlp_size": 32}
    model = ViT(VitConfig(**sizes, num_layers=1, num_heads=2))
    seen: dict[str, torch.Tensor] = {}
    projection = model.patch_embed.proj
    projection.register_forward_hook(lambda module, into, out: seen.update(image=out))
    projection.register_full_backward_hook(lambda m, into, out: seen.update(gradient=out[0]))
    images = torch.randn(2, 3, 16, 16)
    model.eval()(images).square().sum().backward()
    # The original's projection is a convolution.
    want = F.conv2d(images, projection.weight, projection.bias, stride=8)
    torch.testing.assert_close(seen["image"], want, rtol=1e-5, atol=1e-5)
    assert seen["gradient"].shape == (2, 16, 2, 2)
    weight = torch.nn.grad.conv2d_weight(
        images, projection.weight.shape, seen["gradient"], stride=8
    )
    torch.testing.assert_close(projection.weight.grad, weight, rtol=1e-5, atol=1e-5)
    assert model.patch_embed.cls_token.shape == (1, 1, 16)
    assert model.patch_embed.pos_embed.shape == (1, 5, 16)


@pytest.mark.parametrize(("kind", "config"), [(Bert, BertConfig), (GPT2, GPT2Config)])
def test_a_directory_with_a_file_of_save_is_opened(kind, config, tmp_path) -> None:
    """`bmt.save` writes pytorch_model.pt next to config.json, which `from_pretrained` opens."""
    fields = {**SIZES, "num_layers": 1, "dropout_p": 0.0, "half": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    bmt.init_distributed(seed=3)
    try:
        model = kind(config.from_json_file(tmp_path / "config.json"))
        bmt.init_parameters(model)
        bmt.save(model, tmp_path / "pytorch_model.pt")
        again = kind.from_pretrained(tmp_path)
        ids, length = torch.tensor([[3, 4, 5]]), torch.tensor([3])
        wanted = model.eval()(input_ids=ids, length=length, output_logits=True).logits
        logits = again.eval()(input_ids=ids, length=length, output_logits=True).logits
    finally:
        shutdown_distributed()
    assert wanted.std() > 0
    assert torch.equal(logits, wanted)
