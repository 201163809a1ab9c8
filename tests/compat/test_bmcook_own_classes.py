"""BMCook's methods on a program's own layer classes, which scale what a plain layer does not."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmcook import ConfigParser, CookTrainer
from bmforge.compat.model_center.layer import Linear as ModelCenterLinear
from bmforge.errors import ConfigError

WIDTH, VOCAB, LAYERS = 16, 24, 2


class OwnLinear(bmt.DistributedModule):
    """Linear layer without bias that divides by the root of its width."""

    def __init__(self, dim_in: int, dim_out: int, scale_before: bool, has_names: bool) -> None:
        super().__init__()
        self.dim_in, self.dim_out, self.scale_before = dim_in, dim_out, scale_before
        if has_names:
            self.in_features, self.out_features = dim_in, dim_out
        self.weight = bmt.DistributedParameter(torch.randn(dim_out, dim_in))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale_before:
            return F.linear(x / math.sqrt(self.dim_in), self.weight)
        return F.linear(x, self.weight) / math.sqrt(self.dim_in)


class OwnEmbedding(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(VOCAB, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) / math.sqrt(WIDTH)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(bmt.DistributedModule):
    def __init__(self, linear) -> None:
        super().__init__()
        self.w_in, self.w_out = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w_out(F.gelu(self.w_in(x)))


class OwnModel(bmt.DistributedModule):
    def __init__(self, linear) -> None:
        super().__init__()
        self.input_embedding = OwnEmbedding()
        self.layers = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(Block(linear)) for _ in range(LAYERS)]
        )

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.input_embedding.project(self.layers(self.input_embedding(ids))),)


@pytest.fixture(autouse=True)
def start() -> None:
    bmt.init_distributed(seed=0)


def write(folder: Path, **sections) -> ConfigParser:
    (folder / "cook.json").write_text(json.dumps(sections))
    return ConfigParser(str(folder / "cook.json"))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of each row and their step: the largest value of a row is 127 steps."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round(), step


def plain_logits(model: OwnModel, ids: Tensor, scales: bool, before: bool) -> Tensor:
    """What the model computes with int8 products, written out."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        root = math.sqrt(weight.shape[1]) if scales else 1.0
        left, left_step = rounded(x / root if before else x)
        right, right_step = rounded(weight)
        y = (left.double() @ right.double().T).float() * left_step * right_step.T
        return y if before else y / root

    weights = dict(model.named_parameters())
    x = weights["input_embedding.weight"][ids] / math.sqrt(WIDTH)
    for layer in range(LAYERS):
        up, down = (weights[f"layers.{layer}.{name}.weight"] for name in ("w_in", "w_out"))
        x = x + product(F.gelu(product(x, up)), down)
    return x @ weights["input_embedding.weight"].T


@pytest.mark.parametrize(("before", "has_names"), list(itertools.product([False, True], repeat=2)))
def test_int8_products_keep_what_the_class_does_besides(
    tmp_path: Path, before: bool, has_names: bool
) -> None:
    model = OwnModel(lambda a, b: OwnLinear(a, b, before, has_names))
    config = write(tmp_path, quantization={"is_quant": True})
    CookTrainer.set_compression(config, model, quant_layer_cls=OwnLinear)
    ids = torch.randint(0, VOCAB, (2, 5))
    want = plain_logits(model, ids, True, before)
    out = CookTrainer.forward(model, nn.CrossEntropyLoss(), ids, ids)
    torch.testing.assert_close(out.original_output[0], want, rtol=1e-4, atol=1e-4)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_layers_of_model_center_are_recognized(tmp_path: Path) -> None:
    model = OwnModel(lambda a, b: ModelCenterLinear(a, b, length_scale=True))
    bmt.init_parameters(model)
    CookTrainer.set_compression(write(tmp_path, quantization={"is_quant": True}), model)
    ids = torch.randint(0, VOCAB, (2, 5))
    want = plain_logits(model, ids, True, False)
    torch.testing.assert_close(model(ids)[0], want, rtol=1e-4, atol=1e-4)


def test_a_class_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model = OwnModel(lambda a, b: OwnLinear(a, b, False, True))
    config = write(tmp_path, quantization={"is_quant": True})
    with pytest.raises(ConfigError, match="no Conv2d to quantize"):
        CookTrainer.set_compression(config, model, quant_layer_cls=nn.Conv2d)


def test_an_own_embedding_is_pruned(tmp_path: Path) -> None:
    model = OwnModel(lambda a, b: OwnLinear(a, b, False, True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {"pruned_module": ["input_embedding"], "mask_method": "m4n2_1d"}
    before = model.input_embedding.weight.detach().clone()
    CookTrainer.set_compression(
        write(tmp_path, pruning={"is_pruning": True, **names}), model, optimizer
    )
    ids = torch.randint(0, VOCAB, (2, 5))
    CookTrainer.forward(model, nn.CrossEntropyLoss(), ids, ids).loss.backward()
    optimizer.step()
    groups = model.input_embedding.weight.detach().view(-1, 4)
    assert ((groups != 0).sum(1) == 2).all()
    largest = before.abs().view(-1, 4).topk(2).indices.sort().values
    assert torch.equal(groups.nonzero()[:, 1].view(-1, 2), largest)


def test_settings_of_trained_gates_that_bmcook_ignores_are_accepted(tmp_path: Path) -> None:
    sprune = {"training_mask": ["att", "ffn"], "mask_path": "masks.bin", "target_sparsity": 0.5}
    tuning = {"iterative": False, "interval": 100, "ratio": 0.1}
    config = write(tmp_path, pruning={"sprune": {**sprune, "tuning": tuning}})
    from bmforge.compat.bmcook.config import structure_table

    assert structure_table(config.get("pruning")["sprune"])["gates"] == ["attn", "mlp"]
    with pytest.raises(ConfigError, match="is_training=false"):
        structure_table({**config.get("pruning")["sprune"], "is_training": False})
