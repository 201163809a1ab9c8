"""Layers of other sizes: a narrowed model is the whole one whose lost parts add nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, TINY, build, family_of, make_inputs
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.infer.decoder import make_cache
from bmforge.models.changes import Change
from bmforge.models.resize import resize_
from bmforge.models.sizes import Sizes, sizes_of
from bmforge.models.stack import find_heads
from bmforge.nn import Attention, Block, MoESpec
from bmforge.nn.moe import Experts
from bmforge.parallel.pipeline.stages import plan_cutting
from bmforge.parallel.tensor.sharding import match_sharding_rules
from bmforge.testing import assert_close, assert_equal_trees

SEQ2SEQ = ["t5", "cpm2", "eva"]
POST_NORM = ["bert", "roberta", "longformer"]


def first_stack(name: str) -> str:
    return "decoder.layers" if name in SEQ2SEQ else "layers"


def run(model: nn.Module, name: str) -> Tensor:
    """What the model's last layer makes of the inputs, or its head."""
    out = model(**make_inputs(name))
    found: Tensor = out.logits if out.logits is not None else out.last_hidden_state
    return found


def heads_kept(block: Block, new: Block) -> list[int]:
    """Numbers of the query heads that a narrowed block keeps: of each kept group the first."""
    old_spec, spec = block.spec.attn, new.spec.attn
    assert old_spec is not None
    assert spec is not None
    group = old_spec.num_heads // old_spec.num_kv_heads
    kept = spec.num_heads // spec.num_kv_heads
    return [k * group + i for k in range(spec.num_kv_heads) for i in range(kept)]


@torch.no_grad()
def silence_heads_(attn: Any, kept: list[int], old_scale: float, new_scale: float) -> None:
    """Let the other heads add nothing, and the kept ones as with the narrow layer's scale."""
    columns = attn.o_proj.weight.unflatten(1, (-1, attn.head_dim))
    rest = torch.ones(columns.shape[1], dtype=torch.bool)
    rest[kept] = False
    columns[:, rest] = 0.0
    columns *= new_scale / old_scale


@pytest.mark.parametrize("name", TINY)
def test_fewer_heads_and_a_narrower_mlp(name: str) -> None:
    """As the whole model in which the lost heads and features add nothing."""
    whole = build(name)
    small = copy.deepcopy(whole)
    stack = first_stack(name)
    names = [f"{stack}.0", f"{stack}.2"]
    resize_(small, names, Sizes(num_heads=2, intermediate_size=24))
    assert [p.shape for p in small.parameters()] != [p.shape for p in whole.parameters()]
    for layer in names:
        old, new = whole.get_submodule(layer), small.get_submodule(layer)
        for part in ("attn", "cross_attn"):
            if getattr(old, part) is not None:
                scales = (getattr(b.spec, part).out_scale for b in (old, new))
                silence_heads_(getattr(old, part), heads_kept(old, new), *scales)
        with torch.no_grad():
            down = old.mlp.experts.down_proj if name == "mixtral" else old.mlp.down_proj.weight
            down[..., 24:] = 0.0
            down *= new.spec.mlp.out_scale / old.spec.mlp.out_scale
    assert_close(run(small, name), run(whole, name))


@pytest.mark.parametrize("name", [n for n in TINY if n not in (*POST_NORM, "cpm_bee")])
def test_parts_that_are_gone(name: str) -> None:
    """As the whole model in which they add nothing (CPM-Bee's do more: they scale the residual)."""
    whole = build(name)
    small, stack = copy.deepcopy(whole), first_stack(name)
    resize_(small, [f"{stack}.0", f"{stack}.2"], Sizes(attn=False))
    resize_(small, [f"{stack}.1", f"{stack}.2"], Sizes(mlp=False))
    with torch.no_grad():
        for number in "02":
            projection = whole.get_submodule(f"{stack}.{number}.attn.o_proj")
            for parameter in projection.parameters():
                parameter.zero_()
        for number in "12":
            mlp = whole.get_submodule(f"{stack}.{number}.mlp")
            for key, parameter in mlp.named_parameters():
                if "down_proj" in key:
                    parameter.zero_()
    assert_close(run(small, name), run(whole, name))


@pytest.mark.parametrize("name", ["bert", "longformer"])
def test_parts_that_are_gone_behind_a_norm(name: str) -> None:
    """A post-norm layer without a part has its norm no more."""
    whole = build(name)
    small = copy.deepcopy(whole)
    resize_(small, ["layers.1"], Sizes(attn=False))
    block = whole.layers["1"]
    block.forward = lambda x, **_: block.mlp_norm(x + block.mlp(x))
    assert_close(run(small, name), run(whole, name))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "t5", "bert", "minicpm"])
def test_narrower_heads(name: str) -> None:
    """The kept dims of queries and keys alone decide; rotary pairs stay pairs."""
    whole = build(name)
    small, stack = copy.deepcopy(whole), first_stack(name)
    resize_(small, [f"{stack}.1"], Sizes(head_dim=4))
    rope = getattr(whole.spec, "rope", None)
    halves = rope is not None and rope.rotary_dim == 8
    kept = [0, 1, 4, 5] if halves else [0, 1, 2, 3]
    block = whole.get_submodule(f"{stack}.1")
    for attn in (block.attn, block.cross_attn):
        if attn is None:
            continue
        width = attn.head_dim
        lost = [i for i in range(width) if i not in kept]
        with torch.no_grad():
            for projection in (attn.q_proj, attn.v_proj):
                for parameter in projection.parameters():
                    parameter.unflatten(0, (-1, width))[:, lost] = 0.0
            if attn.scale is None:
                for parameter in attn.q_proj.parameters():
                    parameter *= (width / 4) ** 0.5
    assert_close(run(small, name), run(whole, name))


def test_normed_heads_keep_their_dims() -> None:
    """Norms per head (Qwen3) are cut with the head."""
    whole = family_of("qwen").from_config(TINY["qwen"].replace(model_type="qwen3")).eval()
    whole.layers["0"].attn.q_norm.weight.data = torch.arange(8.0)
    resize_(whole, ["layers.0"], Sizes(head_dim=4))
    assert whole.layers["0"].attn.q_norm.weight.tolist() == [0.0, 1.0, 4.0, 5.0]


@pytest.mark.parametrize("name", TINY)
def test_experts_for_an_mlp(name: str) -> None:
    """They are drawn by name, and the layer is one of experts built at once."""
    model, stack = build(name, torch.float32), first_stack(name)
    options = Sizes(num_experts=4, experts_per_token=2, intermediate_size=16)
    resize_(model, [f"{stack}.1"], options)
    block = model.get_submodule(f"{stack}.1")
    assert isinstance(block.spec.mlp, MoESpec)
    assert sum(isinstance(m, Experts) for m in model.modules()) >= 1
    out = run(model.double(), name)
    out.float().pow(2).sum().backward()
    assert block.mlp.experts.down_proj.grad.abs().sum() > 0
    again = build(name, torch.float32)
    resize_(again, [f"{stack}.1"], options)
    assert_equal_trees(again.state_dict(), model.float().state_dict())


@pytest.mark.parametrize("name", TINY)
def test_on_meta_as_on_weights(name: str, tmp_path: Path) -> None:
    """Changes are replayed on meta: a saved model opens with the same sizes and weights."""
    model, stack = build(name, torch.float32), first_stack(name)
    changes = [("0", {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 12})]
    changes += [("1", {"head_dim": 4}), ("2", {"num_experts": 2})]
    changes += [] if name == "gptj" else [("2", {"attn": False})]
    for number, options in changes:
        model.change_(Change("resize", (f"{stack}.{number}",), options))
    empty = family_of(name).from_config(model.config, device="meta")
    assert empty.spec == model.spec
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert {n: p.shape for n, p in empty.named_parameters()} == shapes
    model.save_pretrained(tmp_path)
    again = family_of(name).from_pretrained(tmp_path)
    assert_equal_trees(again.state_dict(), model.state_dict())
    assert again.config == model.config


@pytest.mark.parametrize("name", DECODERS + SEQ2SEQ)
def test_generation_and_caches(name: str) -> None:
    """Token by token as at once, the last layer without attention, heads that differ."""
    model, stack = build(name), first_stack(name)
    resize_(model, [f"{stack}.0"], Sizes(num_heads=2, num_kv_heads=2))
    if name != "gptj":
        resize_(model, [f"{stack}.2"], Sizes(attn=False))
    inputs = make_inputs(name)
    with torch.no_grad():
        want = model(**inputs).logits
        key = "decoder_input_ids" if name in SEQ2SEQ else "input_ids"
        given = inputs.pop(key)
        cache = make_cache(model.get_submodule(stack), 16)
        more: dict[str, Any] = {}
        if name == "glm":
            more = {"position_ids": torch.arange(given.shape[1])[None]}
        parts = []
        for piece in (slice(0, 4), slice(4, 5), slice(5, None)):
            cut = {k: t[:, piece] for k, t in more.items()}
            out = model(**{key: given[:, piece]}, **inputs, **cut, cache=cache)
            parts.append(out.logits)
    assert cache.length == given.shape[1]
    if name == "cpm_ant":  # a text in one go sees what comes later
        want = want[:, -1:]
        parts = [parts[-1][:, -1:]]
        assert parts[0].shape == want.shape
    else:
        assert_close(torch.cat(parts, 1), want)
    if name not in ("cpm_ant", *SEQ2SEQ):
        ids = generate(model, given, max_new_tokens=4, eos_token_id=None)
        assert torch.equal(ids[:, given.shape[1]], want[:, -1].argmax(-1))


@pytest.mark.parametrize("name", TINY)
def test_counts_are_those_of_the_modules(name: str) -> None:
    """FLOPs and cached bytes of a changed config, against the linear layers that are there."""
    model = family_of(name).from_config(TINY[name], device="meta")
    changes = [("0", {"num_heads": 2, "num_kv_heads": 1 if name != "longformer" else 2})]
    changes += [("1", {"intermediate_size": 20}), ("1", {"num_experts": 4, "experts_per_token": 3})]
    changes += [] if name == "gptj" else [("0", {"mlp": False}), ("2", {"attn": False})]
    for number, options in changes:
        model.change_(Change("resize", (f"**layers.{number}",), options))
    config = model.config
    for stack, layers in config.stack_sizes().items():
        assert [sizes_of(b.spec) for b in model.get_submodule(stack).values()] == layers
    assert config.flops_per_token(7) == count_flops(model, name, 7)
    last = list(config.stack_sizes())[-1]
    kept = sum(2 * a.k_proj.out_features for a in attentions(model.get_submodule(last)))
    caches = name not in (*POST_NORM, "vit")
    assert config.kv_bytes_per_token(2) == (2 * kept if caches else 0)


def attentions(model: nn.Module) -> list[Attention]:
    return [m for m in model.modules() if isinstance(m, Attention)]


def count_flops(model: Any, name: str, length: int) -> float:
    """Six per weight of a linear layer or head, twelve per key and dim of a query."""
    weights = sum(count_weights(m) for m in model.modules() if isinstance(m, Block))
    weights += model.config.vocab_size * model.config.hidden_size
    weights += model.embed_patches.weight.numel() if name == "vit" else 0
    widths = sum(a.q_proj.out_features for a in attentions(model))
    return 6 * weights + 12 * widths * length


def count_weights(block: Block) -> float:
    """Weights that are multiplied with a token, one linear layer after the other."""
    total = 0.0
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and "_global_proj" not in name:
            total += module.in_features * module.out_features
        if isinstance(module, Experts):
            total += sum(p.numel() for p in module.parameters()) * module.active_share
    return total


@pytest.mark.parametrize("name", TINY)
def test_flops_of_a_family_are_those_of_its_modules(name: str) -> None:
    """Before any change."""
    model = family_of(name).from_config(TINY[name], device="meta")
    assert model.config.flops_per_token(7) == count_flops(model, name, 7)


def test_units_of_tensor_parallelism() -> None:
    """Every attention is cut by its own heads; a bias for different heads stays whole."""
    model = build("t5")
    resize_(model, ["decoder.layers.1"], Sizes(num_heads=2))
    found: dict[str, tuple[str, int]] = {}
    for name, rule in match_sharding_rules(model, model.tensor_parallel_rules()).items():
        found[name] = (rule.style, rule.units)
    assert found["decoder.layers.1.attn.q_proj"] == ("column", 2)
    assert found["decoder.layers.1.cross_attn.k_proj"] == ("key_value", 2)
    assert found["decoder.layers.0.attn.o_proj"] == ("row", 4)
    assert found["encoder.layers.1.attn.q_proj"] == ("column", 4)
    assert found["decoder.rel_bias"] == ("head_norm", 0)
    assert dict(find_heads(model))["decoder.layers.1.cross_attn"] == (2, 2)


def test_pipelines_cut_by_what_layers_cost() -> None:
    """Three layers, of which the first costs as much as the others together."""
    model = build("llama")
    resize_(model, ["layers.1", "layers.2"], Sizes(attn=False, intermediate_size=20))
    rules = model.layout_rules()
    spans = plan_cutting(strip(model), rules, 2, (), "flops").spans
    assert [tuple(s["layers"])[:2] for s in spans] == [(0, 1), (1, 3)]


def strip(model: Any) -> Any:
    """Leave nothing but the blocks, so that they alone are cut."""
    for name in [n for n, _ in model.named_children() if n != "layers"]:
        delattr(model, name)
    return model


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (["layers.0"], {"num_heads": 3}, "multiple of num_kv_heads=2"),
        (["layers.0"], {"num_heads": 4}, "already has these sizes"),
        (["layers.9"], {"num_heads": 2}, "layers.9.*matches nothing"),
        (["layers.0.attn"], {"num_heads": 2}, "not a layer of this model.*layers.0"),
        (["layers.0"], {"head_dim": 3}, "head_dim=3 is odd"),
        (
            ["layers.0", "layers.1", "layers.2"],
            {"attn": False},
            "remove the attention of all layers",
        ),
        (["layers.0"], {"experts_per_token": 2}, "experts_per_token needs num_experts"),
        (["layers.0"], {"num_experts": 2, "experts_per_token": 3}, "must not exceed num_experts=2"),
        (["layers.0"], {}, "no size is changed"),
        (["layers.0"], {"num_heads": 0}, "num_heads=0 must be a positive"),
        (["layers.0"], {"attn": True}, "attn=True must be False"),
        (["layers.0"], {"mlp": False, "num_experts": 2}, "mlp=False cannot be combined"),
        (["layers.0"], {"heads": 2}, "heads"),
    ],
)
def test_what_does_not_fit_is_refused(
    names: list[str], sizes: dict[str, Any], message: str
) -> None:
    """Before anything is changed, in words."""
    model = build("llama")
    before = [tuple(p.shape) for p in model.parameters()]
    with pytest.raises(ConfigError, match=message):
        model.change_(Change("resize", tuple(names), sizes))
    assert [tuple(p.shape) for p in model.parameters()] == before


def test_families_refuse_what_they_cannot_have() -> None:
    """A missing part, columns of a shared bias, global tokens."""
    cases = [
        ("t5", {"num_heads": 8}, "4 heads of the position bias"),
        ("longformer", {"num_kv_heads": 2}, "global tokens"),
    ]
    for name, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            resize_(build(name), [f"{first_stack(name)}.0"], Sizes(**options))  # type: ignore[arg-type]
    model = build("gpt2")
    resize_(model, ["layers.0"], Sizes(attn=False))
    with pytest.raises(ConfigError, match="it has no attention"):
        resize_(model, ["layers.0"], Sizes(num_heads=2))
    model.layers["1"].mlp.up_proj.lora = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="was already modified, not only resized"):
        resize_(model, ["layers.1"], Sizes(num_heads=2))


def test_flags_stay() -> None:
    """Dtype, frozen parameters and the training flag are those of before; wider parts are drawn."""
    model = build("llama", torch.bfloat16).train()
    model.layers["1"].requires_grad_(False)
    before = model.layers["1"].mlp.up_proj.weight.clone()
    resize_(model, ["layers.1"], Sizes(intermediate_size=64))
    block = model.layers["1"]
    assert block.training
    assert not any(p.requires_grad for p in block.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(block.mlp.up_proj.weight[:40], before)
    assert block.mlp.up_proj.weight[40:].float().std() > 0.1
