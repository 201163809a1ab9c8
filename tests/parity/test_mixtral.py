"""Mixtral, Qwen2-MoE and Qwen3-MoE against transformers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import Model, ModelConfig
from bmforge.models.mixtral import Mixtral, MixtralConfig
from bmforge.models.qwen_moe import Qwen2Moe, Qwen2MoeConfig, Qwen3Moe, Qwen3MoeConfig
from bmforge.testing.batches import make_batch
from bmforge.testing.capability import capability
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.reference_pair import make_twin
from bmforge.testing.tolerance import assert_close

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {**TINY, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 40}


def divide_experts(gradients: dict[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """Bring transformers' fused experts into the form it saves: one tensor per expert."""
    out = {}
    for name, tensor in gradients.items():
        head, mark, kind = name.partition(".mlp.experts.")
        if mark:
            parts = tensor.chunk(2, 1) if kind == "gate_up_proj" else (tensor,)
            kinds = names[:2] if kind == "gate_up_proj" else names[2:]
            for label, part in zip(kinds, parts, strict=True):
                for e, one in enumerate(part):
                    out[f"{head}{label.format(e=e)}.weight"] = one
        else:
            out[name.replace(".mlp.gate.", names[0].partition("experts")[0] + "gate.")] = tensor
    return out


class TestMixtral(DecoderSuite, FileSuite):
    """Mixtral."""

    model_class = Mixtral
    hf_class = transformers.MixtralForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.MixtralForSequenceClassification,
        "token_classification": transformers.MixtralForTokenClassification,
        "question_answering": transformers.MixtralForQuestionAnswering,
        "none": transformers.MixtralModel,
    }
    cases = {  # noqa: RUF012
        "default": MIXTRAL,
        "window": {**MIXTRAL, "sliding_window": 5},
        "one_expert": {**MIXTRAL, "num_experts_per_tok": 1, "num_local_experts": 3},
        "tied": {**MIXTRAL, "tie_word_embeddings": True, "head_dim": 12, "pad_token_id": 0},
        "gelu": {**MIXTRAL, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    }
    not_applicable: ClassVar[dict[str, str]] = {}
    expert_names = tuple(f".block_sparse_moe.experts.{{e}}.w{n}" for n in (1, 3, 2))

    def reference_gradients(self, model: Any) -> dict[str, Tensor]:
        """Divide the experts."""
        return divide_experts(super().reference_gradients(model), self.expert_names)

    @capability("expert")
    def test_expert_parallel(self, tiny: Model) -> None:
        """Experts divided over two processes are one process."""
        self.check_experts(tiny)

    @pytest.mark.long
    @capability("changed: expert")
    def test_changed_experts(self, changed: ModelConfig) -> None:
        """Changed experts divided over two processes are one process."""
        self.check_changed_experts(changed)


class TestQwen2Moe(TestMixtral):
    """Qwen1.5-MoE and Qwen2-MoE."""

    model_class = Qwen2Moe
    hf_class = transformers.Qwen2MoeForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Qwen2MoeForSequenceClassification,
        "token_classification": transformers.Qwen2MoeForTokenClassification,
        "question_answering": transformers.Qwen2MoeForQuestionAnswering,
        "none": transformers.Qwen2MoeModel,
    }
    cases = {  # noqa: RUF012
        "default": QWEN2,
        "normalized": {**QWEN2, "norm_topk_prob": True, "qkv_bias": False},
        "sparse_step": {**QWEN2, "decoder_sparse_step": 2, "num_hidden_layers": 4},
        "dense_layers": {**QWEN2, "mlp_only_layers": [0], "num_hidden_layers": 3},
        "window": {**QWEN2, "use_sliding_window": True, "sliding_window": 5},
    }
    expert_names = tuple(f".mlp.experts.{{e}}.{n}_proj" for n in ("gate", "up", "down"))


class TestQwen3Moe(TestQwen2Moe):
    """Qwen3-MoE."""

    model_class = Qwen3Moe
    hf_class = transformers.Qwen3MoeForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Qwen3MoeForSequenceClassification,
        "token_classification": transformers.Qwen3MoeForTokenClassification,
        "question_answering": transformers.Qwen3MoeForQuestionAnswering,
        "none": transformers.Qwen3MoeModel,
    }
    cases = {  # noqa: RUF012
        "default": {**QWEN, "norm_topk_prob": True},
        "raw_weights": {**QWEN, "head_dim": 12, "attention_bias": True},
        "dense_layers": {**QWEN, "mlp_only_layers": [1], "num_hidden_layers": 3},
        "window": {**QWEN, "use_sliding_window": True, "sliding_window": 5},
    }


FAMILIES = {
    "mixtral": (Mixtral, transformers.MixtralForCausalLM, MIXTRAL),
    "qwen2_moe": (Qwen2Moe, transformers.Qwen2MoeForCausalLM, {**QWEN2, "decoder_sparse_step": 2}),
    "qwen3_moe": (Qwen3Moe, transformers.Qwen3MoeForCausalLM, QWEN),
}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing(family: str, padded: bool, tmp_path: Any) -> None:
    """Router logits, balance, the loss with it and the router's gradient are transformers'."""
    model_class, hf_class, fields = FAMILIES[family]
    fields = {**fields, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    twin = make_twin(model_class, hf_class, fields, tmp_path)
    ids = make_batch(twin.model)
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask if padded else None}
    without = twin.model(**inputs)
    assert without.aux_loss is not None
    inputs["labels"] = ids.masked_fill(mask == 0, -100) if padded else ids
    ours, theirs = twin.model(**inputs), twin.reference(**inputs)
    assert len(ours.router_logits) == len(theirs.router_logits)
    real = mask.flatten().bool() if padded else slice(None)  # padding sees other padding there
    for mine, other in zip(ours.router_logits, theirs.router_logits, strict=True):
        assert_close(mine[real], other[real])
    assert_close(ours.aux_loss, theirs.aux_loss)
    assert_close(ours.loss, theirs.loss)
    ours.loss.backward()
    theirs.loss.backward()
    layer = twin.model.config.num_layers - 1
    gradient = twin.reference.model.layers[layer].mlp.gate.weight.grad
    assert_close(twin.model.layers[str(layer)].mlp.router.weight.grad, gradient)


def test_balance_of_parts_adds_up() -> None:
    """The losses of two halves, each divided by the whole's items, are the whole's loss."""
    config = MixtralConfig.from_hf({**MIXTRAL, "output_router_logits": True})
    model = Mixtral.from_config(config).eval()
    ids = make_batch(model, batch=1).repeat(2, 1)  # equal halves, so the balance is the same
    items = 2 * (ids.shape[1] - 1)
    whole = model(ids, labels=ids).loss
    parts = [model(half, labels=half, num_items_in_batch=items).loss for half in ids.split(1)]
    assert_close(parts[0] + parts[1], whole)


def test_published_forms_of_configs() -> None:
    """Old names, absent fields, and what cannot be computed."""
    raw = {k: v for k, v in QWEN.items() if k != "num_experts"}
    assert Qwen3MoeConfig.from_hf({**raw, "num_local_experts": 5}).num_experts == 5
    assert MixtralConfig.from_hf(MIXTRAL).rope_theta == 1e6
    assert Qwen3MoeConfig.from_hf(QWEN).rope_theta == 10000.0
    assert MixtralConfig.from_hf({**MIXTRAL, "rope_theta": 5.0}).rope_theta == 5.0
    unused = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}
    assert Qwen2MoeConfig.from_hf({**QWEN2, **unused}).window == 0
    with pytest.raises(ConfigError, match="router_jitter_noise"):
        MixtralConfig.from_hf({**MIXTRAL, "router_jitter_noise": 0.1})
    with pytest.raises(ConfigError, match="window_layers"):
        Qwen2MoeConfig.from_hf(QWEN2).replace(window=4)


def test_flops_count_active_experts() -> None:
    """Mixtral 8x7B works with 12.9 billion of its 46.7 billion weights (the paper's 13B)."""
    config = MixtralConfig.preset("mixtral-8x7b")
    norms_and_embedding = 65 * 4096 + 32000 * 4096
    active = config.flops_per_token(0) / 6 + norms_and_embedding
    model = Mixtral.from_config(config, device="meta")
    idle = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) * 6 / 8
    assert active == sum(p.numel() for p in model.parameters()) - idle


PRESETS = [
    (Mixtral, "mixtral-8x7b", 46_702_792_704),
    (Mixtral, "mixtral-8x22b", 140_620_634_112),
    (Qwen2Moe, "qwen1.5-moe-a2.7b", 14_315_784_192),
    (Qwen3Moe, "qwen3-30b-a3b", 30_532_122_624),
    (Qwen3Moe, "qwen3-235b-a22b", 235_093_634_560),
]
HF_CLASSES = {
    Mixtral: transformers.MixtralForCausalLM,
    Qwen2Moe: transformers.Qwen2MoeForCausalLM,
    Qwen3Moe: transformers.Qwen3MoeForCausalLM,
}


@pytest.mark.parametrize(("family", "name", "count"), PRESETS)
def test_preset_sizes(family: Any, name: str, count: int) -> None:
    """The parameter counts of the published files (their hub pages' safetensors totals)."""
    model = family.from_config(family.config_class.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.long
@pytest.mark.parametrize(("family", "name", "count"), PRESETS)
def test_preset_shapes(family: Any, name: str, count: int) -> None:
    """Every preset's shapes are transformers' from the config we write."""
    ours = family.from_config(family.config_class.preset(name), device="meta")
    fields = {k: v for k, v in ours.config.to_hf().items() if k != "model_type"}
    hf_class = HF_CLASSES[family]
    with torch.device("meta"):
        theirs = hf_class(hf_class.config_class(**fields))
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter_name, parameter in ours.named_parameters():
        shape = tuple(parameter.shape)
        if parameter_name.endswith("experts.gate_proj"):
            shape = (shape[0], 2 * shape[1], shape[2])
        shapes[parameter_name.replace("experts.gate_proj", "experts.gate_up_proj")] = shape
    shapes = {n: s for n, s in shapes.items() if not n.endswith("experts.up_proj")}
    assert sorted(shapes.values()) == sorted(tuple(p.shape) for p in theirs.parameters())
    assert sum(p.numel() for p in theirs.parameters()) == count
