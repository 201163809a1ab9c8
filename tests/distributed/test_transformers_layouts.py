"""Transformers models sharded over two processes: loss and gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import AutoModel, load_weights_
from bmforge.models.transformers.small_copy import build_twin
from bmforge.parallel import Layout, data_parallel_size, mesh_of, parallelize
from bmforge.testing import run_distributed

transformers = pytest.importorskip("transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")

CAUSAL_TYPES = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

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


def compute_tensor_gradients(directory: Path) -> dict[str, Tensor] | str:
    """Return the loss and the gradients under tensor parallelism, or why it is refused."""
    model, files = AutoModel.describe_pretrained(directory, backend="transformers")
    try:
        parallelize(model, Layout(tp=2))
    except ConfigError as error:
        return str(error)
    load_weights_(model, files)
    ids, labels = rows()
    items = model.count_items({"input_ids": ids, "labels": labels})
    loss = model(ids, labels=labels, num_items_in_batch=items).loss
    loss.backward()
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def rows() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 150, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def check_tensor_parallel(kind: str, path: Path) -> str:
    """Compare two processes with one; return the reason if the layout is refused."""
    config = transformers.AutoConfig.for_model(kind)
    build_twin(config, "language_model").save_pretrained(path)
    plain = AutoModel.from_pretrained(path, backend="transformers")
    ids, labels = rows()
    loss = plain(ids, labels=labels).loss
    loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for got in run_distributed(compute_tensor_gradients, 2, path):
        if isinstance(got, str):
            return got
        assert set(got) == {"loss", *wanted}
        for name, gradient in {"loss": loss.detach(), **wanted}.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    return ""


# Like Llama; four norms; routed and shared experts; latent attention; fused projections.
SHARDED = ("mistral", "gemma2", "glm4_moe", "deepseek_v3", "phi3")


@pytest.mark.parametrize("kind", SHARDED)
def test_tensor_parallel_has_the_gradients_of_one_process(kind: str, tmp_path: Path) -> None:
    assert check_tensor_parallel(kind, tmp_path) == ""


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(CAUSAL_TYPES) - set(SHARDED)))
def test_every_plan_holds_or_is_refused(kind: str, tmp_path: Path) -> None:
    """No architecture computes wrong gradients: what cannot be sharded says so."""
    try:
        build_twin(transformers.AutoConfig.for_model(kind), "language_model")
    except Exception as error:  # any code of transformers may fail at small sizes
        pytest.skip(f"no small model: {error}")
    reason = check_tensor_parallel(kind, tmp_path)
    assert reason == "" or "tp=2" in reason


@pytest.mark.parametrize(
    ("kind", "layout", "reason"),
    [
        ("falcon_h1", Layout(tp=2), "sharded"),
        ("bart", Layout(tp=2), "no tensor-parallel plan"),
        ("gemma2", Layout(pp=2), "pp=2"),
    ],
)
def test_other_layouts_are_refused(kind: str, layout: Layout, reason: str, tmp_path: Path) -> None:
    build_twin(transformers.AutoConfig.for_model(kind), "language_model").save_pretrained(tmp_path)
    for message in run_distributed(lay_out, 2, tmp_path, layout):
        assert "TransformersModel" in message
        assert reason in message


def lay_out(directory: Path, layout: Layout) -> str:
    """Return the message with which a layout is refused."""
    model, _ = AutoModel.describe_pretrained(directory, backend="transformers")
    try:
        parallelize(model, layout)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"
