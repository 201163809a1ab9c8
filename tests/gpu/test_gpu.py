"""What only an accelerator can show; every test skips itself where there is none."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from bmforge.data import DataLoader, PackedDataset, TokenStore, TokenStoreWriter
from bmforge.device import default_device
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, init_weights_
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize, shutdown_distributed
from bmforge.testing import assert_equal_trees
from bmforge.train import OptimConfig, TrainConfig, Trainer, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]


@pytest.fixture(autouse=True)
def process_group():
    yield
    shutdown_distributed()


@pytest.fixture
def store(tmp_path):
    ids = torch.randint(0, 96, (4000,), generator=torch.Generator().manual_seed(0))
    writer = TokenStoreWriter(tmp_path / "tokens", vocab_size=96)
    for piece in ids.split(100):
        writer.add_item(piece.numpy())
        writer.end_document()
    writer.finalize()
    return TokenStore(tmp_path / "tokens")


def build(family, precision, dropout=0.0, **options):
    """A small model on the accelerator, laid out for `precision`."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    if family == "gpt2":
        model = GPT2.from_config(
            GPT2Config(**sizes, max_seq_len=64, dropout=dropout), device="meta"
        )
    else:
        model = Llama.from_config(
            LlamaConfig(**sizes, intermediate_size=96, num_kv_heads=2), device="meta"
        )
    world = init_distributed()
    mesh = build_mesh(Layout(), world.device)
    parallelize(model, Layout(), mesh=mesh, precision=precision, **options)
    return init_weights_(model, 0, device=world.device), mesh


def whole_tensors(model):
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def train(store, run_dir, precision, until=None, family="gpt2", dropout=0.0, **options):
    model, mesh = build(family, precision, dropout, **options)
    loader = DataLoader(PackedDataset(store, 32), global_batch_size=8, micro_batch_size=4)
    config = TrainConfig(
        steps=8, precision=precision, save_every_steps=4, optim=OptimConfig(lr=3e-3)
    )
    with loader:
        Trainer(model, loader, config, mesh=mesh, run_dir=run_dir).fit(until)
    losses = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]
    return model, losses


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"compile": True}])
def test_half_precision_trains_as_fp32_does(store, tmp_path, family, precision, options):
    _, exact = train(store, tmp_path / "fp32", "fp32", family=family)
    _, half = train(store, tmp_path / "half", precision, family=family, **options)
    assert half == pytest.approx(exact, rel=3e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_bit_exact_with_dropout(store, tmp_path, precision):
    whole, losses = train(store, tmp_path / "whole", precision, dropout=0.1)
    train(store, tmp_path / "parts", precision, until=4, dropout=0.1)
    parts, resumed = train(store, tmp_path / "parts", precision, dropout=0.1)
    assert resumed == losses
    assert_equal_trees(whole_tensors(parts), whole_tensors(whole))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_init_is_the_same_as_on_the_cpu(family):
    on_device, _ = build(family, "fp32")
    there = {name: tensor.cpu() for name, tensor in whole_tensors(on_device).items()}
    here = type(on_device).from_config(on_device.config, seed=0)
    assert default_device().type != "cpu"
    assert_equal_trees(there, {name: p.detach() for name, p in here.named_parameters()})
