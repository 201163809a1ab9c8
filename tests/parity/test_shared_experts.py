"""Decoders with routed and shared experts against transformers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import (
    AutoModel,
    DeepSeekV2,
    DeepSeekV3,
    DeepSeekV3Config,
    GLM4Moe,
    MiniCPM3,
    Model,
    ModelConfig,
)
from bmforge.models.changes import Change
from bmforge.nn.router import pick_experts
from bmforge.testing.capability import capability
from bmforge.testing.derived_suite import DerivedDecoderSuite
from bmforge.testing.native_suite import decode_both_ways
from bmforge.testing.presets import count_preset
from bmforge.testing.tolerance import assert_close, assert_equal_trees
from bmforge.tune.delta import Prefix

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
NO_PREDICTORS = {**TINY, "num_nextn_predict_layers": 0}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def divide_experts(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' gradients with one tensor per expert, as its files have them."""
    out = {}
    for name, tensor in gradients.items():
        layer, is_expert, stack = name.partition(".mlp.experts.")
        if not is_expert:
            out[name] = tensor
            continue
        parts = tensor.chunk(2, 1) if stack == "gate_up_proj" else (tensor,)
        names = PROJECTIONS[:2] if stack == "gate_up_proj" else PROJECTIONS[2:]
        for label, part in zip(names, parts, strict=True):
            for number, matrix in enumerate(part):
                out[f"{layer}.mlp.experts.{number}.{label}.weight"] = matrix
    return out


class ExpertsSuite(DerivedDecoderSuite):
    """All tests of a decoder whose experts the native step does not support."""

    not_applicable = {"native step": "sigmoid routers run in PyTorch"}  # noqa: RUF012

    def check_native_step(self, model: Any, off: float) -> None:
        """Compare the logits of a step, native where it can be, with torch's."""
        native, plain, _ = decode_both_ways(model)
        assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))

    def reference_gradients(self, model: Any) -> dict[str, Tensor]:
        """Return transformers' gradients by the names of its files."""
        return divide_experts(super().reference_gradients(model))

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


REFUSED = "multi-head latent attention cannot be pruned structurally"


class LatentSuite(ExpertsSuite):
    """All tests of a decoder with latent attention, which refuses prefixes and fewer heads."""

    not_applicable = {  # noqa: RUF012
        "native step": "latent attention runs in PyTorch",
        "prefix": "multi-head latent attention does not support trained prefixes",
        "structured": REFUSED,
        "cook": REFUSED,
    }
    test_prefix = test_smaller_shapes = test_all_at_once = None

    def wide_config(self) -> ModelConfig:
        """Return the tiny config with widths divisible by 32."""
        widths = {"expert_size": 32} if hasattr(self.tiny_config(), "expert_size") else {}
        latent = {"kv_rank": 32, "q_rank": 32, "plain_dim": 12, "rope_dim": 4, "value_dim": 8}
        sizes = {"intermediate_size": 64, "head_dim": 16, **latent, **widths}
        return self.tiny_config().replace(**sizes)


class TestGLM4Moe(ExpertsSuite):
    """GLM-4.5."""

    model_class = GLM4Moe
    hf_class = transformers.Glm4MoeForCausalLM
    hf_heads = {"none": transformers.Glm4MoeModel}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "norms": {
            **NO_PREDICTORS,
            "use_qk_norm": True,
            "head_dim": 12,
            "routed_scaling_factor": 2.5,
        },
        "groups": {
            **NO_PREDICTORS,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    }


DEEPSEEK: dict[str, Any] = {
    **TINY,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


V3 = {**DEEPSEEK, "num_nextn_predict_layers": 0}


class TestDeepSeekV3(LatentSuite):
    """DeepSeek-V3."""

    model_class = DeepSeekV3
    hf_class = transformers.DeepseekV3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.DeepseekV3ForSequenceClassification,
        "token_classification": transformers.DeepseekV3ForTokenClassification,
        "none": transformers.DeepseekV3Model,
    }
    cases = {  # noqa: RUF012
        "groups": {**V3, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2},
        "yarn": {**V3, "rope_parameters": YARN, "attention_bias": True},
        "no query latent": {
            **V3,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
    }


class TestDeepSeekV2(LatentSuite):
    """DeepSeek-V2."""

    model_class = DeepSeekV2
    hf_class = transformers.DeepseekV2ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.DeepseekV2ForSequenceClassification,
        "none": transformers.DeepseekV2Model,
    }
    cases = {  # noqa: RUF012
        "greedy": {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN},
        "groups": {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    }


LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DENSE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
DENSE += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", *LATENT)
MINICPM3 = {name: DEEPSEEK[name] for name in (*DENSE, "pad_token_id", "eos_token_id")}
FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}


class TestMiniCPM3(LatentSuite):
    """MiniCPM3."""

    not_applicable = {  # noqa: RUF012
        **LatentSuite.not_applicable,
        "expert": "has no experts",
        "changed: expert": "has no experts",
    }
    test_expert_parallel = test_changed_experts = None
    model_class = MiniCPM3
    hf_class = transformers.MiniCPM3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.MiniCPM3ForSequenceClassification,
        "none": transformers.MiniCPM3Model,
    }
    cases = {  # noqa: RUF012
        "tied": {**MINICPM3, "dim_model_base": 16, "scale_depth": 2.0, "bos_token_id": None},
        "longrope": {
            **MINICPM3,
            "bos_token_id": None,
            "scale_emb": 2,
            "dim_model_base": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "factor": 4.0,
                **FACTORS,
            },
        },
    }


# Family, preset -> published number of parameters in billions, of which the modules that predict
# several tokens have the part that bmforge does not load.
COUNTS = {
    (GLM4Moe, "glm-4.5-air"): 107,  # published as 106 billion
    (GLM4Moe, "glm-4.5"): 353,
    (DeepSeekV3, "deepseek-v3"): 671,
    (DeepSeekV3, "kimi-k2"): 1026,
    (DeepSeekV3, "moonlight-16b-a3b"): 16,
    (DeepSeekV2, "deepseek-v2"): 236,
    (DeepSeekV2, "deepseek-v2-lite"): 16,
    (MiniCPM3, "minicpm3-4b"): 4,
}
CLASSES: dict[Any, Any] = {
    GLM4Moe: transformers.Glm4MoeForCausalLM,
    DeepSeekV3: transformers.DeepseekV3ForCausalLM,
    DeepSeekV2: transformers.DeepseekV2ForCausalLM,
    MiniCPM3: transformers.MiniCPM3ForCausalLM,
}


@pytest.mark.parametrize(("family", "name"), COUNTS)
def test_preset_sizes(family: Any, name: str) -> None:
    """The number of parameters is the published one, and transformers' for the same config."""
    config = family.config_class.preset(name)
    fields = {k: v for k, v in config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = CLASSES[family](CLASSES[family].config_class(**fields))
    count = count_preset(family, name)
    assert count == sum(p.numel() for p in theirs.parameters())
    assert round(count / 1e9) == COUNTS[family, name]


@pytest.mark.parametrize("family", CLASSES)
def test_counts_of_layers(family: Any) -> None:
    """The weights per token, for FLOPs, are those of the linear layers that process a token."""
    config = family.config_class.preset(next(iter(family.config_class.presets)))
    model = family.from_config(config, device="meta")
    for layer, sizes in zip(model.layers.values(), config.stack_sizes()["layers"], strict=True):
        parts = dict(layer.named_parameters())
        count = sum(p.numel() for n, p in parts.items() if p.dim() == 2)
        stacks = sum(p.numel() for p in parts.values() if p.dim() == 3)
        if stacks:
            count += stacks * config.experts_per_token // config.num_experts
        assert sizes.count_weights(config.hidden_size) == count


LOGITS = st.integers(0, 2**31)


@given(
    seed=LOGITS, groups=st.sampled_from([1, 2, 4]), count=st.integers(1, 4), biased=st.booleans()
)
def test_choice_of_experts(seed: int, groups: int, count: int, biased: bool) -> None:
    """Experts and weights are those of a loop over tokens, groups and experts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 8, generator=generator).double()
    bias = torch.randn(8, generator=generator).double() if biased else None
    top = max(1, groups // 2) if count <= 8 // groups * max(1, groups // 2) else groups
    scoring: Any = "sigmoid" if biased else "softmax"
    weights, index = pick_experts(logits, count, scoring, (groups, top), bias)
    size = 8 // groups
    for token in range(5):
        row = logits[token].tolist()
        total = sum(math.exp(x) for x in row)
        scores = [1 / (1 + math.exp(-x)) if biased else math.exp(x) / total for x in row]
        ranked = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        best = {}
        for group in range(groups):
            inside = sorted(ranked[group * size : (group + 1) * size], reverse=True)
            best[group] = sum(inside[: 2 if biased else 1])
        allowed = sorted(best, key=lambda group: -best[group])[:top] if groups > 1 else [0]
        experts = [e for group in allowed for e in range(group * size, (group + 1) * size)]
        chosen = sorted(experts, key=lambda e: -ranked[e])[:count]
        assert index[token].tolist() == chosen
        assert_close(weights[token], torch.tensor([scores[e] for e in chosen], dtype=torch.float64))


def tiny_model(family: Any) -> Any:
    """Return a tiny model of a family with two layers."""
    common = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_size": 24, "num_heads": 4}
    experts |= {"expert_groups": 1, "top_groups": 1, "num_dense": 1}
    latent = {"kv_rank": 16, "q_rank": 0, "plain_dim": 8, "rope_dim": 4, "value_dim": 10}
    more = {"head_dim": 8, "num_kv_heads": 2} if family is GLM4Moe else latent
    return family.from_config(family.config_class(**common, **experts, **more))


def test_bias_of_the_choice_stays_in_fp32() -> None:
    """A model in bf16 keeps the bias, whose differences decide between experts."""
    model = tiny_model(GLM4Moe)
    bias = torch.linspace(4.0, 4.01, 8)
    model.layers["1"].mlp.router.choice_bias.copy_(bias)
    assert torch.equal(model.to(torch.bfloat16).layers["1"].mlp.router.choice_bias, bias)
    assert model.layers["1"].mlp.router.weight.dtype == torch.bfloat16


def test_modules_for_several_tokens_are_not_loaded(tmp_path: Path) -> None:
    """Tensors behind the last layer are left out; those of an unknown name are refused."""
    model = tiny_model(GLM4Moe)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(2)}, path)
    assert_equal_trees(GLM4Moe.from_pretrained(tmp_path).state_dict(), model.state_dict())
    save_file({**tensors, "model.layers.1.eh_proj.weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.eh_proj"):
        GLM4Moe.from_pretrained(tmp_path)


def test_what_latent_attention_refuses() -> None:
    """Prefixes, structural pruning and fewer heads are refused by name."""
    model = tiny_model(DeepSeekV3)
    with pytest.raises(ConfigError, match="latent attention"):
        model.change_(Change("resize", ("layers.*",), {"num_heads": 2, "num_kv_heads": 2}))
    with pytest.raises(ConfigError, match="does not support a trained prefix"):
        Prefix(model, length=2)
    with pytest.raises(ConfigError, match="structural pruning does not support"):
        blocks_of(model)


@torch.no_grad()
def test_pruned_model_is_the_silenced_model() -> None:
    """Removed layers, features and experts give the model in which they contribute zero.

    The dense layers are counted anew, and the shared experts keep their common width.
    """
    config = tiny_model(GLM4Moe).config.replace(num_layers=3, num_dense=2)
    whole = GLM4Moe.from_config(config, dtype=torch.float64).eval()
    whole.layers["2"].mlp.router.choice_bias.copy_(torch.linspace(-1.0, 1.0, 8))
    small = copy.deepcopy(whole)
    chosen = (6, 1, 3, 4)
    kept = KeptIndices(experts=chosen, features=(tuple(range(0, 24, 2)),) * 4)
    apply_plan_(small, PruningPlan({"layers.2": kept}, gone=("layers.0",)), uniform=True)
    sizes = small.config.num_dense, small.config.expert_size, small.config.num_shared
    assert (*sizes, small.config.changes) == (1, 12, 2, ())
    whole.layers["0"].attn.o_proj.weight.zero_()
    whole.layers["0"].mlp.down_proj.weight.zero_()
    experts = whole.layers["2"].mlp
    experts.experts.down_proj[:, :, 1::2] = 0.0
    experts.router.choice_bias[[e for e in range(8) if e not in chosen]] = -10.0
    ids = torch.arange(40).view(2, 20)
    assert_close(small(ids).logits, whole(ids).logits)


def test_fewer_experts_keep_the_bias() -> None:
    """The first experts of a layer keep their bias."""
    model = tiny_model(DeepSeekV3)
    model.layers["1"].mlp.router.choice_bias.copy_(torch.arange(8.0))
    model.change_(Change("resize", ("layers.1",), {"num_experts": 5}))
    assert model.layers["1"].mlp.router.choice_bias.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert model(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 20}, "head_dim=20 must equal plain_dim=8"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 must equal num_heads=4"),
        ({"value_dim": 13}, "value_dim=13"),
        ({"num_dense": 3}, "num_dense=3"),
        ({"expert_groups": 3}, "expert_groups=3 must divide num_experts=8"),
        ({"expert_groups": 8, "top_groups": 1}, "top_groups=1 of expert_groups=8"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Inconsistent sizes are named."""
    good = tiny_model(DeepSeekV3).config
    with pytest.raises(ConfigError, match=message):
        good.replace(**fields)


def test_kimi_is_opened() -> None:
    """Kimi K2's config.json has its own model_type and DeepSeek-V3's architecture."""
    raw = {**V3, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    raw |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_alpha": 0.001}
    config = AutoModel.family_of(raw).config_class.from_hf(raw)
    assert isinstance(config, DeepSeekV3Config)
    assert config.to_hf()["model_type"] == "kimi_k2"
    with pytest.raises(ConfigError, match="scoring_func='softmax'"):
        DeepSeekV3Config.from_hf({**raw, "scoring_func": "softmax"})
