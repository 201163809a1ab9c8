"""Quantisation during training: gradients, bits, and int8 products in earnest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import gpt2, hf_gpt2, llama, logits, mixtral, texts
from torch import Tensor

from bmforge.compress import rounding
from bmforge.compress.matrices import find_matrices
from bmforge.compress.prune import PruneConfig, Sparsifier
from bmforge.compress.quantize import FakeQuantize, QuantizeConfig, int8_linear
from bmforge.compress.quantize.int8_product import multiply_int8
from bmforge.compress.rounding import (
    quantize_rows,
    round_activations,
    round_matrix,
    round_weight,
)
from bmforge.errors import ConfigError
from bmforge.models.pack import quantize_
from bmforge.nn.packing import PRESETS, QuantSpec, quantize_groups
from bmforge.nn.plain_products import multiply_plain, quantize_activations
from bmforge.nn.products import pack_weights
from bmforge.surgery import wrappers_of
from bmforge.testing import assert_close

SPECS = {
    **PRESETS,
    "minima": QuantSpec(4, 32, symmetric=False),
    "floats": QuantSpec(4, 32, activations="float"),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rounded_floats_are_what_is_stored(spec: QuantSpec) -> None:
    layer = torch.nn.Linear(256, 48)
    stored: Any = quantize_(torch.nn.Sequential(layer), spec, where=["0"])[0]
    assert torch.equal(round_matrix(layer.weight.detach(), spec), stored.dense(torch.float32))


def test_the_gradient_goes_straight_through() -> None:
    """As if rounded weights and inputs were what is trained."""
    spec, weight, x = PRESETS["int4"], randn(32, 64).requires_grad_(), randn(5, 64, seed=1)
    x.requires_grad_()
    F.linear(round_activations(x, 32), round_weight(weight, spec)).sin().sum().backward()
    other = round_matrix(weight.detach(), spec).requires_grad_()
    values, scales = quantize_activations(x.detach(), 32)
    y = (values.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2).requires_grad_()
    F.linear(y, other).sin().sum().backward()
    assert torch.equal(weight.grad, other.grad)
    assert torch.equal(x.grad, y.grad)


def train(model: Any, steps: int = 4) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    model.train()
    for ids in texts(steps, seed=5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize(
    ("training", "scheme", "build"),
    [
        ("fake", "int4", llama),
        ("fake", "int8", gpt2),
        ("fake", "int4", hf_gpt2),
        ("fake", "int8-dynamic", mixtral),
        ("int8", "int8-dynamic", llama),
        ("int8-both", "int8-dynamic", hf_gpt2),
    ],
)
def test_trained_bits_are_the_stored_ones(
    training: Any, scheme: str, build: Callable[[], Any]
) -> None:
    """What the last forward pass computed with is what `finish_` packs; the outputs are alike."""
    model = build()
    method = FakeQuantize(QuantizeConfig(scheme=scheme, training=training))
    method.attach_(model)
    losses = train(model)
    assert all(torch.isfinite(torch.tensor(losses)))
    want = {m.name: round_matrix(m.read(), PRESETS[scheme]) for m in find_matrices(model)}
    ids = texts()[0]
    before = logits(model, ids)
    facts = method.finish_(model)
    assert facts == {"scheme": scheme, "training": training}
    for name, values in want.items():
        owner, _, rest = name.partition(".experts.")
        if rest:
            key, index = rest[:-1].split("[")
            store: Any = model.get_submodule(f"{owner}.experts")
            assert torch.equal(store.dense(key, torch.float32)[int(index)], values)
        else:
            assert torch.equal(model.get_submodule(name).dense(torch.float32), values)
    after = logits(model, ids)
    # A value on the border between two integers may fall to either side.
    assert (after - before).norm() < 0.02 * before.norm()
    assert not any(wrappers_of(module) for module in model.modules())


@pytest.mark.parametrize("bias", [False, True])
def test_int8_in_earnest_has_the_bits_of_the_runtime(bias: bool) -> None:
    spec, weight, x = PRESETS["int8-dynamic"], randn(40, 96), randn(7, 96, seed=1)
    added = randn(40, seed=2) if bias else None
    want = multiply_plain(x, pack_weights(weight, spec), 40, spec, added)
    assert torch.equal(int8_linear(x, weight, added), want)
    assert torch.equal(int8_linear(x.view(1, 7, 96), weight, added)[0], want)


def test_int8_products_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-127, 128, s, generator=generator) for s in ((5, 33), (33, 9)))
    got = multiply_int8(left.to(torch.int8), right.to(torch.int8))
    assert torch.equal(got.long(), left @ right)


def plain_int8(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """BMCook's scheme written down row by row, with both backward products in integers."""

    def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
        scale = matrix.abs().amax(1) / 127
        return (matrix / scale[:, None]).round(), scale

    tokens, token_scale = rounded(x)
    rows, row_scale = rounded(weight)
    out = tokens @ rows.t() * token_scale[:, None] * row_scale
    left, left_scale = rounded(grad * row_scale)
    x_grad = left @ rows * left_scale[:, None]
    left, left_scale = rounded((grad * token_scale[:, None]).t())
    return out, x_grad, left @ tokens * left_scale[:, None]


def test_int8_backward_against_a_plain_one() -> None:
    x, weight, grad = randn(20, 48).double(), randn(16, 48, seed=1).double(), randn(20, 16, seed=2)
    want = plain_int8(x, weight, grad.double())
    a, b = x.float().requires_grad_(), weight.float().requires_grad_()
    out = int8_linear(a, b, in_both=True)
    out.backward(grad)
    for got, expected in zip((out, a.grad, b.grad), want, strict=True):
        off = (got.double() - expected).abs().max() / expected.abs().max()
        assert off < 2e-3  # a value on the border between two integers may fall to either side


def test_on_real_activations() -> None:
    """Every linear layer of a trained model: forward within 1.5 %, gradients within 0.99."""
    model = gpt2(tie_word_embeddings=False)
    train(model, 30)
    seen: list[tuple[Any, Tensor]] = []
    hooks = [
        m.module.register_forward_pre_hook(lambda mod, args: seen.append((mod, args[0].detach())))
        for m in find_matrices(model)
    ]
    logits(model, texts(seed=9)[0])
    for hook in hooks:
        hook.remove()
    assert len(seen) == 12
    for module, x in seen:
        weight = module.weight.detach()
        plain = F.linear(x, weight)
        grad = randn(*plain.shape, seed=3)
        wanted = grad.flatten(0, -2) @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)
        for both in (False, True):
            a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
            out = int8_linear(a, b, in_both=both)
            out.backward(grad)
            assert (out - plain).norm() < 0.015 * plain.norm()
            assert a.grad is not None
            assert b.grad is not None
            for got, want in zip((a.grad.flatten(0, -2), b.grad), wanted, strict=True):
                assert torch.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.99


def test_against_torchaos_rounding() -> None:
    """The same integers and floats as its affine primitives make of the same scales."""
    from torchao.quantization.quant_primitives import dequantize_affine, quantize_affine

    weight = randn(64, 256)
    for name, low, high in (("int4", -8, 7), ("int8", -127, 127)):
        spec = replace(PRESETS[name], scale_dtype="float32")
        found = quantize_groups(weight, spec)
        scales, zeros = found.scales.float(), torch.zeros(64, 8, dtype=torch.int32)
        block = (1, spec.group_size)
        theirs = quantize_affine(weight, block, scales, zeros, torch.int8, low, high)
        # Halves go away from zero here, and to even numbers there.
        assert (theirs != found.values).double().mean() < 5e-4
        assert (theirs - found.values).abs().max() <= 1
        back = dequantize_affine(found.values, block, scales, zeros, torch.int8, low, high)
        assert torch.equal(back, round_matrix(weight, spec))


def test_what_cannot_be_trained_so() -> None:
    with pytest.raises(ConfigError, match="not a multiple of 32"):
        FakeQuantize(QuantizeConfig(scheme="int4", training="fake")).attach_(
            llama(intermediate_size=40)
        )
    with pytest.raises(ConfigError, match="specs=choose_specs"):
        FakeQuantize(QuantizeConfig(scheme="auto", average_bits=5.0, training="fake"))
    config = QuantizeConfig(scheme="int8-dynamic", training="int8")
    with pytest.raises(ConfigError, match="supports only linear layers of blocks"):
        FakeQuantize(config).attach_(mixtral())
    model = llama()
    FakeQuantize(config).attach_(model)
    with pytest.raises(ConfigError, match="already has a wrapper with order_key='rounding'"):
        FakeQuantize(config).attach_(model)
    with pytest.raises(ConfigError, match="supports only linear layers and experts"):
        FakeQuantize(QuantizeConfig(training="fake", where=("embed",))).attach_(llama())


def test_after_training_alone() -> None:
    model = llama()
    method = FakeQuantize(QuantizeConfig(scheme="int8"))
    method.attach_(model)
    assert not any(wrappers_of(module) for module in model.modules())
    assert method.finish_(model) == {"scheme": "int8", "method": "absmax"}
    assert_close(
        model.layers["0"].attn.q_proj.dense(torch.float32),
        round_matrix(llama().layers["0"].attn.q_proj.weight.detach(), PRESETS["int8"]),
    )


def test_kernels_and_torch_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler and without: the same bits of weights, activations and products."""
    weight, x = randn(37, 96), randn(9, 96, seed=1)

    def everything() -> list[Tensor]:
        found = [round_matrix(weight, spec) for spec in SPECS.values() if spec.fits(96)]
        found += [round_activations(x, group) for group in (32, 96)]
        return [*found, *quantize_rows(weight, PRESETS["int8-dynamic"]), int8_linear(x, weight)]

    first = everything()
    monkeypatch.setattr(rounding, "load_kernels", lambda: None)
    for a, b in zip(first, everything(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("training", "scheme"), [("fake", "int4"), ("int8", "int8-dynamic")])
def test_zeros_and_integers_together(training: Any, scheme: str) -> None:
    """Trained with both, in either order of attaching: the zeros are zeros in the packed model."""
    for first in (0, 1):
        model = llama()
        sparsifier = Sparsifier(PruneConfig(pattern="2:4"))
        integers = FakeQuantize(QuantizeConfig(scheme=scheme, training=training))
        for method in (sparsifier, integers)[:: 1 - 2 * first]:
            method.attach_(model)
        gone = {m.name: m.read() == 0 for m in find_matrices(model)}
        train(model)
        assert sparsifier.finish_(model)["share"] == 0.5
        integers.finish_(model)
        for name, mask in gone.items():
            assert torch.equal(model.get_submodule(name).dense(torch.float32)[mask].unique(), ZERO)


ZERO = torch.zeros(1)
