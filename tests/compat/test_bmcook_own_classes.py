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
from bmforge.compat.bmcook import ConfigParser, CookTrainer, save
from bmforge.compat.bmcook.pruning import pruning_of
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


HEADS, INNER = 2, 2 * WIDTH
SUBLAYERS = {"attn": "self_att.self_attention.attention_out", "mlp": "ffn.ffn.w_out"}


class OwnAttention(bmt.DistributedModule):
    """Attention of every token to every token, with the names of ModelCenter's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        names = ("project_q", "project_k", "project_v", "attention_out")
        for name in names:
            setattr(self, name, OwnLinear(WIDTH, WIDTH, False, True))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.project_q, self.project_k, self.project_v)
        )
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class OwnFeedForward(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Module()
        self.w_in.w = OwnLinear(WIDTH, INNER, False, True)
        self.w_out = OwnLinear(INNER, WIDTH, True, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(F.gelu(self.w_in.w(x)))


class Residual(bmt.DistributedModule):
    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + getattr(self, self.name)(hidden)


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.self_att = Residual("self_attention", OwnAttention())
        self.ffn = Residual("ffn", OwnFeedForward())

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.self_att(hidden=x))


class LayeredModel(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.input_embedding = OwnEmbedding()
        self.encoder = nn.Module()
        self.encoder.layers = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(Layer()) for _ in range(LAYERS)]
        )

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.input_embedding.project(self.encoder.layers(self.input_embedding(ids))),)


def gated_logits(model: LayeredModel, ids: Tensor, gates: dict[str, Tensor]) -> Tensor:
    """What the model computes with gates, written out; a missing gate is open."""

    def gate(layer: int, kind: str) -> Tensor:
        return gates.get(f"encoder.layers.{layer}.{kind}", torch.ones(1))

    weights = {name: p for name, p in model.named_parameters() if not name.endswith("delta")}
    x = weights["input_embedding.weight"][ids] / math.sqrt(WIDTH)
    for layer in range(LAYERS):
        start, before = x, f"encoder.layers.{layer}"
        att = {
            n: weights[f"{before}.self_att.self_attention.{n}.weight"]
            for n in ("project_q", "project_k", "project_v", "attention_out")
        }
        q, k, v = (x @ att[f"project_{n}"].T / math.sqrt(WIDTH) for n in "qkv")
        size, outs = WIDTH // HEADS, []
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            scores = (q[..., own] @ k[..., own].transpose(-1, -2)).softmax(-1)
            values = gate(layer, "heads")
            outs.append(scores @ v[..., own] * values[head % len(values)])
        added = torch.cat(outs, -1) @ att["attention_out"].T / math.sqrt(WIDTH)
        x = x + gate(layer, "attn") * added
        inner = F.gelu(x @ weights[f"{before}.ffn.ffn.w_in.w.weight"].T / math.sqrt(WIDTH))
        inner = inner * gate(layer, "features") / math.sqrt(INNER)
        x = x + gate(layer, "mlp") * (inner @ weights[f"{before}.ffn.ffn.w_out.weight"].T)
        x = start + gate(layer, "block") * (x - start)
    return x @ weights["input_embedding.weight"].T


KINDS = [["num_heads", "dim_ff"], ["transformer", "num_heads"], ["att", "ffn", "dim_ff"]]


@pytest.mark.parametrize("masks", KINDS)
def test_gates_scale_heads_features_and_sublayers_of_own_blocks(
    tmp_path: Path, masks: list[str]
) -> None:
    model = LayeredModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sprune = {"training_mask": masks, "target_sparsity": 0.5}
    section = {"is_pruning": True, "mask_method": "sprune", "sprune": sprune}
    CookTrainer.set_compression(write(tmp_path, pruning=section), model, optimizer)
    method = pruning_of(model).method
    gates = {f"{name}.{kind}": gate for (name, kind), gate in method.gates.items()}
    ids = torch.randint(0, VOCAB, (2, 5))
    with torch.no_grad():
        for gate in gates.values():  # away from the start, where all gates are open
            gate.delta.uniform_(-4, 2)
    for training in (True, False):
        model.train(training)
        values = {name: gate.values() for name, gate in gates.items()}
        want = gated_logits(model, ids, values)
        torch.testing.assert_close(model(ids)[0], want, rtol=1e-4, atol=1e-4)
    # Parameters of open units: four matrices per head, two per feature, and a norm per sublayer.
    open_now = {name: gate.density() for name, gate in gates.items()}
    costs = 0.0
    for layer in range(LAYERS):

        def count(kind: str, units: int, layer: int = layer) -> Tensor:
            return open_now.get(f"encoder.layers.{layer}.{kind}", torch.ones(units)).sum()

        attn = count("attn", 1) * (WIDTH + count("heads", HEADS) * 4 * WIDTH * WIDTH / HEADS)
        mlp = count("mlp", 1) * (WIDTH + count("features", INNER) * 2 * WIDTH)
        costs += float((count("block", 1) * (attn + mlp)).detach())
    total = LAYERS * (2 * WIDTH + 4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    assert method.costs.total == total
    assert float(method.costs.expect({k: g.density() for k, g in method.gates.items()})) == (
        pytest.approx(costs, rel=1e-6)
    )


@pytest.mark.parametrize("masks", KINDS)
def test_weights_of_pruned_units_of_own_blocks_are_zero(tmp_path: Path, masks: list[str]) -> None:
    model = LayeredModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sprune = {"training_mask": masks, "target_sparsity": 0.5}
    section = {"is_pruning": True, "mask_method": "sprune", "sprune": sprune}
    CookTrainer.set_compression(write(tmp_path, pruning=section), model, optimizer)
    ids = torch.randint(0, VOCAB, (2, 5))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("delta")}
    for _ in range(2):
        out = CookTrainer.forward(model, nn.CrossEntropyLoss(), ids, ids)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(out.lag_loss) != 0
    assert all(not torch.equal(model.get_parameter(n), value) for n, value in before.items())
    method = pruning_of(model).method
    method._fix_(model)
    model.eval()
    want = model(ids)[0]
    save(model, str(tmp_path / "pruned.pt"), "prune")
    torch.testing.assert_close(model(ids)[0], want, rtol=1e-5, atol=1e-5)
    tensors = torch.load(tmp_path / "pruned.pt", weights_only=True)
    assert not any(name.endswith("delta") for name in tensors)
    left = 0
    for name, weight in tensors.items():
        columns = int(weight.any(0).sum())
        if name.endswith(SUBLAYERS["attn"] + ".weight"):
            left += 4 * WIDTH * columns + WIDTH * bool(columns)
        elif name.endswith(SUBLAYERS["mlp"] + ".weight"):
            left += 2 * WIDTH * columns + WIDTH * bool(columns)
    assert 0 < left <= 0.5 * LAYERS * (2 * WIDTH + 4 * WIDTH * WIDTH + 2 * WIDTH * INNER)


def test_blocks_of_other_shapes_are_refused(tmp_path: Path) -> None:
    model = OwnModel(lambda a, b: OwnLinear(a, b, False, True))
    section = {"is_pruning": True, "mask_method": "sprune", "sprune": {"training_mask": ["att"]}}
    with pytest.raises(ConfigError, match=r"self_att\.self_attention and ffn\.ffn, which this"):
        CookTrainer.set_compression(write(tmp_path, pruning=section), model)
