"""Transformers models sharded over two processes: loss and gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import AutoModel, load_weights_
from bmforge.models.transformers.twin import build_twin
from bmforge.parallel import Layout, data_parallel_size, mesh_of, parallelize
from bmforge.testing import run_distributed

transformers = pytest.importorskip("transformers")

# Fused experts, norms around every part, a hybrid with recurrent layers, unshifted labels.
KINDS = ("glm4_moe", "gemma2", "falcon_h1", "bart")


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def compute_gradients(directory: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the gradients of one step over four rows, and their loss."""
    model, files = AutoModel.describe_pretrained(directory, backend="transformers")
    parallelize(model, layout)
    load_weights_(model, files)
    ids = torch.randint(5, 150, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7] = -100  # ranks have different numbers of items
    batch = {"input_ids": ids, "labels": labels}
    items = model.count_items(batch) / data_parallel_size(mesh_of(model))
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    own = {name: tensor[rows] for name, tensor in batch.items()}
    model(**own, num_items_in_batch=items).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    build_twin(transformers.AutoConfig.for_model(request.param), "language_model").save_pretrained(
        path
    )
    return path


def test_zero_3_has_the_gradients_of_one_process(directory: Path) -> None:
    plain = AutoModel.from_pretrained(directory, backend="transformers")
    ids = torch.randint(5, 150, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7] = -100
    plain(ids, labels=labels).loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for got in run_distributed(compute_gradients, 2, directory, Layout(zero=3)):
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2)], ids=str)
def test_other_layouts_are_refused(directory: Path, layout: Layout) -> None:
    for message in run_distributed(lay_out, 2, directory, layout):
        assert "TransformersModel" in message


def lay_out(directory: Path, layout: Layout) -> str:
    """Return the message with which a layout is refused."""
    model, _ = AutoModel.describe_pretrained(directory, backend="transformers")
    try:
        parallelize(model, layout)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"
