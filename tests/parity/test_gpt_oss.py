"""gpt-oss against transformers: sinks, windows, clamped experts with biases, MXFP4 files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import AutoModel, GptOss, GptOssConfig, Model, ModelConfig
from bmforge.models.changes import Change
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import run_reads
from bmforge.models.weights import WeightRule
from bmforge.nn import Attention, AttentionSpec
from bmforge.nn.moe import MoE, MoESpec
from bmforge.shards import Box
from bmforge.testing.capability import capability
from bmforge.testing.derived_suite import DerivedDecoderSuite
from bmforge.testing.native_suite import decode_both_ways
from bmforge.testing.presets import count_preset
from bmforge.testing.reference_pair import make_twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "swiglu_limit": 0.5,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}


class TestGptOss(DerivedDecoderSuite):
    """gpt-oss."""

    not_applicable = {"native step": "attention sinks run in PyTorch"}  # noqa: RUF012
    model_class = GptOss
    hf_class = transformers.GptOssForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.GptOssForSequenceClassification,
        "token_classification": transformers.GptOssForTokenClassification,
        "none": transformers.GptOssModel,
    }
    cases = {  # noqa: RUF012
        "default": {**TINY, "rope_parameters": DEFAULT_ROPE},
        "yarn": {**TINY, "rope_parameters": YARN, "head_dim": 12, "attention_bias": False},
        "published": {
            **TINY,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
            "swiglu_limit": 7.0,
        },
    }

    def check_native_step(self, model: Any, off: float) -> None:
        """Compare the logits of a step, native where it can be, with torch's."""
        native, plain, _ = decode_both_ways(model)
        assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))

    @pytest.mark.long
    @capability("expert")
    def test_expert_parallel(self, tiny: Model) -> None:
        """Experts sharded over two processes give the numbers of one process."""
        self.check_experts(tiny)

    @pytest.mark.long
    @capability("changed: expert")
    def test_changed_experts(self, changed: ModelConfig) -> None:
        """Changed experts sharded over two processes give the numbers of one process."""
        self.check_changed_experts(changed)

    def test_balance_loss(self, tmp_path: Path) -> None:
        """The load-balancing loss is part of the loss if the config says so."""
        fields = {**TINY, "output_router_logits": True, "router_aux_loss_coef": 0.5}
        twin = make_twin(GptOss, self.hf_class, fields, tmp_path)
        self.check_gradients(twin)


def attend_slowly(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, mask: Tensor
) -> Tensor:
    """Return attention whose softmax has the sinks in its denominator, head by head."""
    out = torch.zeros_like(query)
    times = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // times].transpose(1, 2) * scale
        weights = scores.exp() * mask
        total = weights.sum(-1, keepdim=True) + sinks[head].exp()
        out[:, head] = weights / total @ value[:, head // times]
    return out


@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 2)]),
    tokens=st.sampled_from([1, 4]),
    width=st.sampled_from([2, 7, 8]),
    scale=st.sampled_from([None, 0.3]),
    has_prefix=st.booleans(),
    has_gradient=st.booleans(),
)
def test_sinks(
    seed: int,
    groups: tuple[int, int],
    tokens: int,
    width: int,
    scale: float | None,
    has_prefix: bool,
    has_gradient: bool,
) -> None:
    """Attention with sinks, and its gradients, are those of the formula."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        out = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return out.requires_grad_(has_gradient)

    heads, length = groups[0] * groups[1], 5
    spec = AttentionSpec(heads, groups[0], width, scale=scale, sinks=True)
    attn: Any = Attention(8, spec).double()
    sinks = draw(heads)
    attn.sinks.bias = torch.nn.Parameter(sinks.detach().clone(), requires_grad=has_gradient)
    query, key, value = draw(2, heads, tokens, width), *(draw(2, groups[0], 5, width) for _ in "kv")
    prefix = (draw(groups[0], 2, width), draw(groups[0], 2, width)) if has_prefix else None
    keys, values, mask = key, value, torch.ones(tokens, length).tril(length - tokens).double()
    if prefix is not None:
        attn.prefix = lambda: prefix
        attn.prefix.adapter_weight = 1.0
        keys, values = (
            torch.cat((part.expand(2, -1, -1, -1), own), 2)
            for part, own in zip(prefix, (key, value), strict=True)
        )
        mask = torch.cat((torch.ones(tokens, 2), mask), 1)
    with torch.set_grad_enabled(has_gradient):
        out = attn._mix(query, key, value, mask[None, None, :, -length:].bool(), None)
    expected = attend_slowly(query, keys, values, sinks, scale or width**-0.5, mask)
    assert_close(out, expected)
    if has_gradient:
        inputs = [query, key, value, *(prefix or ())]
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        theirs = torch.autograd.grad(expected, [*inputs, sinks], weight)
        ours = torch.autograd.grad(out, [*inputs, attn.sinks.bias], weight)
        assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))


def test_experts_beyond_the_capacity_add_no_bias() -> None:
    """A token without an expert gets neither its output nor its bias."""
    spec = MoESpec(2, 1, 6, bias=True, router_bias=True, capacity_factor=0.5, swiglu_limit=1.0)
    moe = MoE(4, spec).double().train()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([1.0, 0.0]))
        moe.down_bias.fill_(1.0)
        out = moe(torch.randn(1, 8, 4).double())[0][0]
    assert (out.abs().sum(-1) > 0).tolist() == [True, True] + [False] * 6


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)])
def test_preset_sizes(name: str, billions: float) -> None:
    """The number of parameters is the published one, and transformers' for the same config."""
    config = GptOssConfig.preset(name)
    fields = {k: v for k, v in config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields))
    count = count_preset(GptOss, name)
    assert count == sum(p.numel() for p in theirs.parameters())
    assert round(count / 1e9, 1) == billions


PUBLISHED = {
    **TINY,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "experts_per_token": 3,
    "initial_context_length": 4096,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    },
}


def write_mxfp4(directory: Path) -> dict[str, Tensor]:
    """Write a model whose experts are in MXFP4; return the tensors of the same model in bf16."""
    torch.manual_seed(0)
    plain = {k: v for k, v in PUBLISHED.items() if k not in ("quantization_config", "model_type")}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**plain))
    tensors = dict(model.to(torch.bfloat16).state_dict())
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.contiguous()
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 130, blocks.shape[:3], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(PUBLISHED))
    return tensors


def test_mxfp4_is_read(tmp_path: Path) -> None:
    """Experts in MXFP4 have transformers' values, and are saved as floats."""
    source = tmp_path / "mxfp4"
    source.mkdir()
    expected = write_mxfp4(source)
    model: Any = AutoModel.from_pretrained(source, dtype=torch.bfloat16)
    assert isinstance(model, GptOss)
    model.save_pretrained(tmp_path / "saved")
    assert_equal_trees(load_file(tmp_path / "saved" / "model.safetensors"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    saved = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.arange(20)[None]
    exact: Any = AutoModel.from_pretrained(source, dtype=torch.float32)
    assert_close(exact(ids).logits, saved(ids).logits, atol=1e-4, rtol=1e-4)


def test_any_slice_of_mxfp4_is_read(tmp_path: Path) -> None:
    """A slice of a stack, as a rank or a streamer reads it, is the slice of the whole."""
    whole = write_mxfp4(tmp_path)
    files = WeightFiles(tmp_path)

    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(
            st.sampled_from([n for n in whole if n in files.shapes and "experts" in n])
        )
        bounds = [
            sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
            for n in whole[name].shape
        ]
        box = tuple(slice(*pair) for pair in bounds)
        assert torch.equal(files.read(name, box), whole[name][box])

    check()


def test_mxfp4_without_scales_is_refused(tmp_path: Path) -> None:
    """Blocks without scales, or with scales of another shape, are named."""
    write_mxfp4(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong in ({}, {name: tensors[name][:, :4].contiguous()}):
        save_file({k: v for k, v in tensors.items() if k != name} | wrong, path)
        with pytest.raises(
            CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj have unsupported"
        ):
            AutoModel.from_pretrained(tmp_path)


@given(data=st.data(), sizes=st.tuples(*[st.integers(1, 4)] * 3), transpose=st.booleans())
def test_alternating_rows(
    data: st.DataObject, sizes: tuple[int, int, int], transpose: bool, tmp_path_factory: Any
) -> None:
    """Two stacks whose rows alternate in a file are read in any slice, and written back."""
    directory = tmp_path_factory.mktemp("rows")
    stacks = {name: torch.randn(sizes) for name in ("a", "b")}
    rules = [
        WeightRule(name, "fused", transpose, (first, 2 * sizes[1]), part_dim=1, step=2)
        for first, name in enumerate(stacks)
    ]
    fused = rules[0].join([stacks["a"], stacks["b"]], rules)
    rows = torch.empty(sizes[0], 2 * sizes[1], sizes[2])
    rows[:, 0::2], rows[:, 1::2] = stacks["a"], stacks["b"]
    assert torch.equal(fused, rows.transpose(1, 2) if transpose else rows)
    save_file({"fused": fused}, directory / "model.safetensors")
    files = WeightFiles(directory)
    for rule in rules:
        assert rule.source_shape(sizes) == fused.shape
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
        pairs = zip(sizes, offsets, strict=True)
        box = Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in pairs))
        target = torch.empty(box.lengths)
        slices = rule.source_slices(box)
        run_reads([files.plan_read("fused", slices, rule.source_view(target))])
        region = tuple(slice(o, o + n) for o, n in zip(offsets, box.lengths, strict=True))
        assert torch.equal(target, stacks[rule.parameter][region])


def tiny_model() -> Any:
    """Return a tiny model with random sinks and biases."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": 5}
    config = GptOssConfig(**sizes, **heads, num_experts=6, experts_per_token=2)
    model: Any = GptOss.from_config(config, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.add_(noise, alpha=0.1)
    return model


@torch.no_grad()
def test_pruned_model_is_the_silenced_model() -> None:
    """Removed heads, features and experts give the model in which they contribute zero."""
    whole = tiny_model()
    small = copy.deepcopy(whole)
    experts, features = (5, 1, 3), tuple(range(0, 24, 2))
    kept = KeptIndices(heads=(2, 3), experts=experts, features=(features,) * 3)
    apply_plan_(small, PruningPlan({"layers.0": kept, "layers.1": kept}))
    for layer in whole.layers.values():
        layer.attn.o_proj.weight[:, :16] = 0.0
        layer.mlp.experts.down_proj[:, :, 1::2] = 0.0
        layer.mlp.router.bias[[e for e in range(6) if e not in experts]] = -100.0
    ids = torch.arange(40).view(2, 20)
    assert_close(small(ids).logits, whole(ids).logits)


def test_implied_head_width_is_written() -> None:
    """A head width of hidden_size / num_heads is stated, since transformers' default is 64."""
    config = tiny_model().config
    again = GptOssConfig.from_hf(config.to_hf())
    assert again.head_dim == config.head_dim == 8
    fields = {k: v for k, v in config.to_hf().items() if k != "model_type"}
    assert transformers.GptOssConfig(**fields).head_dim == 8


def test_fewer_heads_keep_their_sinks() -> None:
    """The first key-value heads, and the first query heads of each, keep their sinks."""
    model = tiny_model()
    before = model.layers["1"].attn.sinks.bias.tolist()
    model.change_(Change("resize", ("layers.1",), {"num_heads": 2, "num_kv_heads": 2}))
    assert model.layers["1"].attn.sinks.bias.tolist() == [before[0], before[2]]
    assert model(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0 must be positive"),
        ({"sliding_window": -1}, "window=-1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Fields with other values than the block supports are named."""
    with pytest.raises(ConfigError, match=message):
        GptOss.from_config(GptOssConfig.from_hf({**TINY, **fields}), device="meta")
