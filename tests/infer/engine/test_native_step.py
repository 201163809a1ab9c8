"""The native step: what it takes, what it leaves to torch, and every variant of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.compress.prune.gates import attach_gates_, detach_gates_
from bmforge.compress.prune.structure_config import GATE_KINDS
from bmforge.infer import KVCache, generate
from bmforge.infer.decoder import Decoder
from bmforge.infer.engine import native_step
from bmforge.infer.engine.native_blocks import Watch
from bmforge.infer.engine.native_step import NativeStep, load_step
from bmforge.models import Llama, LlamaConfig, Qwen, QwenConfig
from bmforge.models.pack import quantize_
from bmforge.nn import products
from bmforge.nn.packing import QuantSpec
from bmforge.nn.products import load_variant, runnable_variants
from bmforge.testing.native_suite import decode_both_ways
from bmforge.testing.tolerance import assert_close

IDS = torch.arange(3, 17)[None]


@pytest.fixture(autouse=True)
def _needs_compiler() -> None:
    if load_step() is None:
        pytest.skip("no compiler here")


def small(**options: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "vocab_size": 97}
    heads = {"num_heads": 4, "num_kv_heads": 2}
    return Llama.from_config(LlamaConfig(**{**sizes, **heads, **options})).eval()


class Decoding:
    """A decoder behind its prompt, whose next step is compared with torch's."""

    def __init__(self, model: Any, rows: int = 1) -> None:
        self.decoder = Decoder(model, None, 14)
        self.step: Any = self.decoder.cache.step
        self.rows, self.at = rows, 5
        self.decoder.run(IDS[:, :5].expand(rows, -1))

    @torch.no_grad()
    def run(self) -> tuple[Tensor, tuple[int, int]]:
        """Return the next scores, and how many blocks ran natively and through torch."""
        token = IDS[:, self.at : self.at + 1].expand(self.rows, -1)
        self.at += 1
        scores = self.decoder.run(token)
        return scores, (self.step.native_blocks, self.step.torch_blocks)


@torch.no_grad()
def scores_of(model: Any, tokens: int) -> Tensor:
    """Return the last scores of a whole row, by no cache at all."""
    return model(IDS[:, :tokens]).logits[:, -1]


@torch.no_grad()
def begin(model: Any, rows: int = 1) -> Decoding:
    return Decoding(model, rows)


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp16", "int8", "int4-128", "float"])
@torch.no_grad()
def test_every_variant_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, variant: str, scheme: str
) -> None:
    """On one thread and two, of all kinds of weights; and they are near torch's."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(scheme, torch.float32)
    model = small(hidden_size=128, intermediate_size=256).to(dtype)
    if scheme in ("int8", "int4-128"):
        quantize_(model, scheme)
    if scheme == "float":
        quantize_(model, QuantSpec(8, 64, False, "float"), where=["layers.**.mlp.*"])
    found = []
    for name, threads in ((runnable_variants()[0], 1), (variant, 1), (variant, 2)):
        monkeypatch.setattr(native_step, "load_step", lambda name=name: load_step(name))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            native, plain, counts = decode_both_ways(model, masked=False)
        finally:
            torch.set_num_threads(before)
        assert counts[1:] == [(3, 0)] * 4
        assert load_variant(name) is not None
        found.append(native)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    off = {"fp32": 1e-5, "float": 1e-5}.get(scheme, 0.03)
    assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))


@torch.no_grad()
def test_windows_and_long_rows() -> None:
    """Scores are those of the whole row, when the window has long left its beginning."""
    config = QwenConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        window=4,
        window_layers=[2, 3],
        attn_bias=False,
    )
    model: Any = Qwen.from_config(config).eval()
    assert {layer.attn.window for layer in model.layers.values()} == {None, 4}
    decoding = begin(model)
    for _ in range(6):
        scores, counts = decoding.run()
        assert counts == (4, 0)
        assert_close(scores, scores_of(model, decoding.at))


def test_the_prompt_and_many_tokens_go_through_torch() -> None:
    """As do gradients, other places for the hidden states, and a whole batch too large."""
    model = small()
    decoding = begin(model)
    assert (decoding.step.native_blocks, decoding.step.torch_blocks) == (0, 0)
    out = model(IDS[:, 5:6], cache=decoding.decoder.cache)  # gradients are wanted
    assert decoding.step.native_blocks == 0
    assert out.logits.requires_grad
    many = begin(model, rows=17)
    assert many.run()[1] == (0, 0)
    assert begin(model, rows=16).run()[1] == (3, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert begin(model).run()[1] == (0, 0)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, inputs, out: out * 2)


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2, *inputs[1:]))


def new_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda *args, **more: plain(*args, **more) * 2  # type: ignore[method-assign]


class Twice(nn.Linear):
    """Another class of the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def other_class(module: nn.Module) -> None:
    module.__class__ = Twice


def parametrized(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Dropout(0.0))


@pytest.mark.parametrize("change", [hook, pre_hook, new_forward, other_class, parametrized])
@pytest.mark.parametrize("name", ["attn.q_proj", "mlp.down_proj"])
def test_a_changed_block_goes_through_torch(change: Callable[[Any], None], name: str) -> None:
    """Whatever was changed, before or while it writes; the others stay native."""
    model = small()
    twin = copy.deepcopy(model)
    decoding = begin(model)
    assert decoding.run()[1] == (3, 0)
    place = f"layers.1.{name}"
    change(model.get_submodule(place))
    after, counts = decoding.run()
    assert counts == (2, 1)
    decoding.decoder.cache.step = None
    with torch.no_grad():
        again = Decoder(twin, None, 14)
        again.cache.step = None
        again.run(IDS[:, :6])
        change(twin.get_submodule(place))
        assert_close(after, again.run(IDS[:, 6:7]))
    assert begin(model).run()[1] == (2, 1)


def test_hooks_of_blocks_and_of_all_modules() -> None:
    """A block's own hook, a hook of every module, and a compiled module."""
    model = small()
    seen: list[nn.Module] = []
    decoding = begin(model)
    handle = model.layers["2"].register_forward_hook(lambda module, *_: seen.append(module))
    assert decoding.run()[1] == (2, 1)
    assert seen == [model.layers["2"]]
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: None)
    try:
        assert decoding.run()[1] == (0, 0)
    finally:
        everywhere.remove()
    model.layers["0"].attn.q_proj.compile(backend="eager")
    assert begin(model).run()[1] == (2, 1)


@pytest.mark.parametrize("kind", [kind for kind in GATE_KINDS if kind != "hidden"])
@torch.no_grad()
def test_gated_blocks_go_through_torch(kind: str) -> None:
    """Every kind of gate alone, attached and removed while the model writes."""
    model = small()
    open_model = copy.deepcopy(model)
    native, plain = begin(model), begin(model)
    plain.decoder.cache.step = None
    assert native.run()[1] == (3, 0)
    plain.run()
    for gate in attach_gates_(model, (kind,)).values():
        gate.mask = torch.arange(gate.units) % 2.0
    scores, counts = native.run()
    assert counts == (0, 0)
    assert_close(scores, plain.run()[0])
    assert not torch.allclose(scores, scores_of(open_model, native.at), rtol=1e-3)
    detach_gates_(model)
    assert_close(native.run()[0], plain.run()[0])
    assert begin(model).run()[1] == (3, 0)


def replaced_data(model: Any) -> None:
    weight = model.layers["0"].mlp.up_proj.weight
    weight.data = weight.data * 2


def in_place(model: Any) -> None:
    model.layers["0"].mlp.up_proj.weight.mul_(2)


def turned(model: Any) -> None:
    weight = model.layers["1"].attn.q_proj.weight
    weight.data = weight.data.t()


def new_parameter(model: Any) -> None:
    norm = model.layers["2"].attn_norm
    norm.weight = nn.Parameter(norm.weight * 3)


def new_linear(model: Any) -> None:
    model.layers["1"].mlp.gate_proj = nn.Linear(64, 96).eval()


def new_scale(model: Any) -> None:
    model.layers["0"].attn.scale = 0.5


def new_block(model: Any) -> None:
    model.layers["1"] = copy.deepcopy(model.layers["2"])
    model.layers["1"].attn.layer_index = 1


def packed(model: Any) -> None:
    quantize_(model, QuantSpec(8, 32, activations="float"), where=["layers.1.mlp.*"])


@pytest.mark.parametrize(
    "change",
    [
        replaced_data,
        in_place,
        turned,
        new_parameter,
        new_linear,
        new_scale,
        new_block,
        packed,
    ],
)
@torch.no_grad()
def test_a_model_that_changes_while_it_writes(change: Callable[[Any], None]) -> None:
    """The next token is what torch makes of the changed model and the same past."""
    model = small()
    native, plain = begin(model), begin(model)
    plain.decoder.cache.step = None
    for decoding in (native, plain):
        decoding.run()
    change(model)
    scores, counts = native.run()
    assert sum(counts) == 3
    assert counts[0] >= 2
    assert_close(scores, plain.run()[0])


def test_blocks_are_looked_at_once_where_nobody_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While `generate` has the model for itself; whoever gets a token may change it."""
    looked: list[Watch] = []
    look = Watch.sees_change
    monkeypatch.setattr(Watch, "sees_change", lambda self: looked.append(self) or look(self))
    model = small()
    want = generate(model, IDS, max_new_tokens=8)
    assert len(looked) == 0  # the first token's description is new
    other = copy.deepcopy(model)
    decoding = begin(other)
    decoding.run()
    looked.clear()
    with decoding.decoder.undisturbed():
        for _ in range(3):
            assert_close(decoding.run()[0], scores_of(other, decoding.at))
    assert len(looked) == 1
    other.layers["1"].mlp = nn.Identity()
    assert decoding.run()[1] == (2, 1)
    assert len(looked) == 2
    handles = []

    def disturb(_: Tensor) -> None:
        if not handles:
            handles.append(model.layers["2"].register_forward_hook(lambda *_: calls.append(1)))

    calls: list[int] = []
    assert torch.equal(generate(model, IDS, max_new_tokens=8, on_token=disturb), want)
    assert len(calls) == 7


def test_buffers_that_move_are_found_again() -> None:
    """Other rows have other buffers; what was remembered of the old ones is not used."""
    model = small()
    decoding = begin(model)
    with decoding.decoder.undisturbed():
        decoding.run()
        for rows in (3, 2):
            decoding.decoder.reorder(torch.zeros(rows, dtype=torch.int64))
            decoding.rows = rows
            for _ in range(2):
                scores, counts = decoding.run()
                assert counts == (3, 0)
                assert_close(scores, scores_of(model, decoding.at).expand(rows, -1))


@torch.no_grad()
def test_unknown_children_and_prefixes_go_through_torch() -> None:
    """An unknown child of a layer, and a subclass of the prefix, are not supported."""
    from bmforge.nn.prefix import KeyValuePrefix

    class OwnPrefix(KeyValuePrefix):
        pass

    model = small()
    model.layers["0"].attn.q_proj.add_module("beside", nn.Linear(1, 1).eval())
    model.layers["2"].attn.prefix = OwnPrefix(2, 3, 16).eval()
    assert begin(model).run()[1] == (1, 2)
    model.layers["1"].train()
    assert begin(model).run()[1] == (0, 0)


@torch.no_grad()
def test_steps_share_a_cache_with_torch() -> None:
    """Native and torch's steps take turns over one cache; a full one says so as ever."""
    model = small()
    decoding = begin(model)
    step = decoding.step
    for number in range(9):
        decoding.decoder.cache.step = step if number % 2 else None
        assert_close(decoding.run()[0], scores_of(model, decoding.at))
    with pytest.raises(Exception, match="of max_length=14 tokens"):
        decoding.decoder.run(IDS[:, :1])


def test_generate_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedily, by sampling and with beams, the ids are those of torch's way."""
    model, calls = small(), []
    plain = NativeStep.__call__

    def counted(self: NativeStep, *args: Any) -> Any:
        out = plain(self, *args)
        calls.append(self.native_blocks)
        return out

    for options in ({}, {"do_sample": True, "seed": 3}, {"num_beams": 3}):
        monkeypatch.setattr(NativeStep, "__call__", counted)
        got = generate(model, IDS, max_new_tokens=8, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(NativeStep, "__call__", lambda self, *_: None)
        assert torch.equal(got, generate(model, IDS, max_new_tokens=8, **options))  # type: ignore[arg-type]
    assert calls.count(3) == 21


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    load_step.cache_clear()
    monkeypatch.setattr(native_step, "load_kernels", lambda: None)
    try:
        assert begin(small()).run()[1] == (0, 0)
    finally:
        load_step.cache_clear()
    assert products.load_kernels() is not None


def test_a_plain_cache_runs_blocks_one_by_one() -> None:
    assert KVCache(2, 4).step is None


def test_blocks_on_an_accelerator_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes up to a minute, and the step reads host memory only."""

    def fail() -> None:
        raise AssertionError("the step was compiled")

    monkeypatch.setattr(native_step, "load_step", fail)
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_heads=4, num_layers=2)
    model = Llama.from_config(config, device="meta").eval()
    assert not NativeStep().knows(model.layers)
