"""Decoders whose files have q, k and v in one layer, interleaved by head, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from bmforge.errors import ConfigError
from bmforge.models import Bloom, BloomConfig, Falcon, FalconConfig, GPTNeoX, GPTNeoXConfig
from bmforge.models.changes import Change
from bmforge.models.weights import (
    WeightRule,
    assemble_source,
    expand_rules,
    group_by_source,
)
from bmforge.nn.alibi import alibi_slopes
from bmforge.nn.attention import compute_attention
from bmforge.parallel import Layout
from bmforge.shards import Box
from bmforge.testing import assert_close
from bmforge.testing.derived_suite import DerivedDecoderSuite
from bmforge.testing.native_suite import decode_both_ways
from bmforge.testing.presets import check_preset_shapes, count_preset

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
BLOOM = {name: TINY[name] for name in ("vocab_size", "hidden_size", "pad_token_id")}
BLOOM |= {"n_layer": 2, "eos_token_id": None, "bos_token_id": None}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


class FusedSuite(DerivedDecoderSuite):
    """All tests of a decoder some of whose blocks the native step does not support."""

    not_applicable = {"native step": "blocks with two parallel norms run in PyTorch"}  # noqa: RUF012

    def check_native_step(self, model: Any, off: float) -> None:
        """Compare the logits of a step, native where it can be, with torch's."""
        native, plain, _ = decode_both_ways(model)
        assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))


class TestGPTNeoX(FusedSuite):
    """GPT-NeoX and Pythia."""

    model_class = GPTNeoX
    hf_class = transformers.GPTNeoXForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.GPTNeoXForSequenceClassification,
        "token_classification": transformers.GPTNeoXForTokenClassification,
        "question_answering": transformers.GPTNeoXForQuestionAnswering,
        "none": transformers.GPTNeoXModel,
    }
    cases = {  # noqa: RUF012
        "parallel": {**TINY, "intermediate_size": 48, "rope_parameters": PARTIAL},
        "sequential": {
            **TINY,
            "intermediate_size": 48,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    }

    def reference_gradients(self, model: Any) -> dict[str, Tensor]:
        """Return transformers' gradients; it names the head otherwise than its files do."""
        gradients = super().reference_gradients(model)
        return {n.replace("lm_head", "embed_out"): grad for n, grad in gradients.items()}


class TestFalcon(FusedSuite):
    """Falcon."""

    model_class = Falcon
    hf_class = transformers.FalconForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.FalconForSequenceClassification,
        "token_classification": transformers.FalconForTokenClassification,
        "question_answering": transformers.FalconForQuestionAnswering,
        "none": transformers.FalconModel,
    }
    cases = {  # noqa: RUF012
        "two norms": {
            **TINY,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "tie_word_embeddings": False,
        },
        "one norm": {
            **TINY,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
        "one key head": {**TINY, "ffn_hidden_size": 48},
        "sequential": {**TINY, "multi_query": False, "parallel_attn": False, "bias": True},
    }


class TestBloom(FusedSuite):
    """BLOOM."""

    not_applicable = {"native step": "blocks with ALiBi run in PyTorch"}  # noqa: RUF012
    model_class = Bloom
    hf_class = transformers.BloomForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.BloomForSequenceClassification,
        "token_classification": transformers.BloomForTokenClassification,
        "question_answering": transformers.BloomForQuestionAnswering,
        "none": transformers.BloomModel,
    }
    cases = {  # noqa: RUF012
        "tied": {**BLOOM, "n_head": 4},
        "six heads": {**BLOOM, "hidden_size": 24, "n_head": 6, "tie_word_embeddings": False},
    }

    @pytest.mark.parametrize("method", ["ring", "ulysses"])
    def test_slopes_of_sharded_tokens(self, tiny: Bloom, method: str) -> None:
        """Each method of context parallelism adds the bias of the tokens' positions."""
        self.check_layout(tiny, world=2, layout=Layout(cp=2, cp_method=method))


COUNTS = {
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "falcon-7b": 6_921_720_704,
}
CLASSES: dict[Any, Any] = {
    GPTNeoX: transformers.GPTNeoXForCausalLM,
    Falcon: transformers.FalconForCausalLM,
    Bloom: transformers.BloomForCausalLM,
}
PRESETS = [(family, name) for family in CLASSES for name in family.config_class.presets]


@pytest.mark.parametrize(("family", "name"), [pair for pair in PRESETS if pair[1] in COUNTS])
def test_preset_sizes(family: Any, name: str) -> None:
    """The published numbers of parameters, tied heads counted once."""
    assert count_preset(family, name) == COUNTS[name]


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_every_preset_shapes(family: Any, name: str) -> None:
    """Every preset's shapes are transformers'."""
    renamed = {"lm_head.weight": "embed_out.weight"} if family is GPTNeoX else {}
    check_preset_shapes(family, CLASSES[family], name, renamed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 2, "num_heads": 4}, "new_decoder_architecture=True"),
        ({"parallel_norms": True}, "parallel_norms=True"),
        ({"head_dim": 12}, "head_dim=12"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=True"),
    ],
)
def test_wrong_falcon_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Fields that transformers would not read are named."""
    with pytest.raises(ConfigError, match=message):
        FalconConfig(**{"hidden_size": 32, "num_heads": 4, **fields})


def test_former_rotary_fields() -> None:
    """GPT-NeoX's fields before transformers 5 are read, and are written for all versions."""
    raw = {**TINY, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 300}
    config = GPTNeoXConfig.from_hf(raw)
    assert (config.rotary_part, config.rope_theta) == (0.5, 300.0)
    written = config.to_hf()
    assert GPTNeoXConfig.from_hf(written) == config
    theirs = transformers.GPTNeoXConfig(**written).rope_parameters
    assert (theirs["partial_rotary_factor"], theirs["rope_theta"]) == (0.5, 300.0)


@given(
    groups=st.integers(1, 4),
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    start=st.integers(0, 6),
    length=st.integers(1, 6),
    is_bias=st.booleans(),
)
def test_interleaved_rows(
    groups: int, sizes: tuple[int, ...], start: int, length: int, is_bias: bool
) -> None:
    """Whole tensors and slices of q, k and v agree with a reshape of the fused tensor."""
    tail = () if is_bias else (2,)
    shapes = {f"layers.0.{n}": (groups * s, *tail) for n, s in zip("qkv", sizes, strict=True)}
    firsts = [sum(sizes[:number]) * groups for number in range(3)]
    total = sum(sizes) * groups
    rules = [
        WeightRule(f"layers.{{i}}.{n}", "h.{i}.qkv", part=(first, total), groups=groups)
        for n, first in zip("qkv", firsts, strict=True)
    ]
    fused = torch.arange(total * (1 if is_bias else 2)).reshape(total, *tail)
    pieces = fused.reshape(groups, sum(sizes), *tail).split(list(sizes), 1)
    whole = {name: part.flatten(0, 1) for name, part in zip(shapes, pieces, strict=True)}
    expanded = expand_rules(rules, shapes)
    groups_of = group_by_source(expanded)
    assert torch.equal(assemble_source(groups_of["h.0.qkv"], whole.__getitem__), fused)
    order = WeightRule.interleaved_order(expanded)
    joined = torch.cat(list(whole.values()))
    assert torch.equal(joined if order is None else joined[order], fused)
    for name, shape in shapes.items():
        first = min(start, shape[0] - 1)
        rows = min(length, shape[0] - first)
        box = Box((first, *[0] * len(tail)), (rows, *tail))
        local = torch.full(box.lengths, -1)
        for rule in expanded:
            slices = rule.source_slices(box) if rule.parameter == name else None
            if slices is not None:
                assert rule.source_shape(shape) == tuple(fused.shape)
                rule.target(local, box).copy_(fused[slices])
        assert torch.equal(local, whole[name][first : first + rows])


def test_rows_of_a_resized_layer_are_kept() -> None:
    """A layer whose rows the groups do not divide is stored as a concatenation."""
    rules = [
        WeightRule(f"layers.{{i}}.{n}", "h.{i}.qkv", part=(4 * number, 12), groups=4)
        for number, n in enumerate("qkv")
    ]
    whole = {f"layers.0.{n}": torch.arange(3) + 3 * number for number, n in enumerate("qkv")}
    expanded = expand_rules(rules, dict.fromkeys(whole, (3,)))
    assert WeightRule.interleaved_order(expanded) is None
    assert torch.equal(assemble_source(expanded, whole.__getitem__), torch.arange(9))


@pytest.mark.parametrize("mode", ["lora", "dora", "apart"])
def test_adapters_of_peft(mode: str, tmp_path: Path) -> None:
    """An adapter on the fused layer has the same effect in PEFT, from and to its files."""
    peft = pytest.importorskip("peft")
    from bmforge.tune.delta import Lora, load_delta

    torch.manual_seed(0)
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**TINY, intermediate_size=48)
    )
    theirs.save_pretrained(tmp_path / "base")
    ids = torch.randint(0, 96, (2, 7))
    ours = GPTNeoX.from_pretrained(tmp_path / "base")
    if mode == "apart":
        delta = Lora(ours, targets=["attn.q", "attn.v"], rank=2)
    else:
        options = peft.LoraConfig(
            r=2,
            target_modules=["query_key_value"],
            use_dora=mode == "dora",
            init_lora_weights=False,
        )
        wrapped = peft.get_peft_model(theirs, options)
        wrapped.save_pretrained(tmp_path / "adapter")
        delta = load_delta(ours, tmp_path / "adapter")
        assert_close(ours(ids).logits, wrapped(ids).logits)
        theirs = wrapped.unload()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    delta.save(tmp_path / "back")
    read = peft.PeftModel.from_pretrained(theirs, tmp_path / "back")
    assert_close(read(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 112])
def test_alibi_slopes(heads: int) -> None:
    """The slopes are those of transformers, for any number of heads."""
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert_close(torch.tensor(alibi_slopes(heads)), expected)


def test_alibi_of_a_prefix() -> None:
    """The tokens of a trained prefix count as positions before the text."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25])
    prefix = (key[0, :, :2], value[0, :, :2])
    whole = compute_attention(
        query, key, value, None, None, True, None, 0.0, slopes=lambda _: slopes
    )
    parts = [part[:, :, 2:] for part in (query, key, value)]
    out = compute_attention(*parts, None, None, True, None, 0.0, prefix, slopes=lambda _: slopes)
    assert_close(out, whole[:, :, 2:])
    last = [query[:, :, -1:], key[:, :, 2:], value[:, :, 2:]]
    with torch.no_grad():
        out = compute_attention(*last, None, None, True, None, 0.0, prefix, slopes=lambda _: slopes)
    assert_close(out, whole[:, :, -1:])


def test_former_fields_of_bloom() -> None:
    """Published config.json files have former names of the sizes."""
    raw = {"model_type": "bloom", "n_embed": 32, "num_attention_heads": 4, "n_layer": 2}
    config = BloomConfig.from_hf({**raw, "vocab_size": 96, "seq_length": 64, "n_inner": None})
    assert (config.hidden_size, config.num_heads, config.max_seq_len) == (32, 4, 64)
    written = config.to_hf()
    assert BloomConfig.from_hf(written) == config
    theirs = transformers.BloomConfig(**written)
    assert (theirs.hidden_size, theirs.n_head, theirs.n_layer) == (32, 4, 2)


def test_heads_with_slopes_are_not_pruned() -> None:
    """Removing heads would give the others other slopes."""
    config = BloomConfig(vocab_size=96, hidden_size=32, num_layers=1, num_heads=4)
    sizes = Change("resize", ("layers.*",), {"num_heads": 2, "num_kv_heads": 2})
    with pytest.raises(ConfigError, match="ALiBi"):
        Bloom.from_config(config).change_(sizes)
