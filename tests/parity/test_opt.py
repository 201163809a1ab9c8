"""OPT against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmforge.errors import ConfigError
from bmforge.infer import KVCache
from bmforge.models.opt import OPT, OPTConfig
from bmforge.testing.batches import make_batch
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import check_preset_shapes, count_preset
from bmforge.testing.reference_pair import make_twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
TINY_350M = {**TINY, "do_layer_norm_before": False, "word_embed_proj_dim": 16}


class TestOPT(DecoderSuite, FileSuite):
    """OPT."""

    model_class = OPT
    hf_class = transformers.OPTForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.OPTForSequenceClassification,
        "question_answering": transformers.OPTForQuestionAnswering,
        "none": transformers.OPTModel,
    }
    cases = {  # noqa: RUF012
        "default": TINY,
        "350m": TINY_350M,
        "projected_pre_norm": {**TINY, "word_embed_proj_dim": 48},
        "no_final_norm": {**TINY, "_remove_final_layer_norm": True},
        "no_biases": {**TINY, "enable_bias": False},
        "plain_norms": {**TINY, "layer_norm_elementwise_affine": False},
        "untied": {**TINY, "tie_word_embeddings": False},
        "gelu": {**TINY, "activation_function": "gelu", "pad_token_id": None},
    }


@pytest.mark.parametrize("fields", [TINY, TINY_350M], ids=["default", "350m"])
@pytest.mark.parametrize("holes", ["left", "right", "middle"])
def test_positions_come_from_the_mask(fields: dict[str, Any], holes: str, tmp_path: Path) -> None:
    """With a mask and no positions the numbers are transformers', whole and through a cache."""
    twin = make_twin(OPT, transformers.OPTForCausalLM, fields, tmp_path)
    ids = make_batch(twin.model)
    mask = torch.ones_like(ids)
    places = {"left": slice(0, 4), "right": slice(8, 12), "middle": slice(3, 6)}
    mask[0, places[holes]] = 0
    theirs = twin.reference(ids, attention_mask=mask).logits
    ours = twin.model(ids, attention_mask=mask).logits
    assert_close(ours[mask.bool()], theirs[mask.bool()])
    assert_close(twin.model(ids, attention_mask=mask.bool()).logits, ours)
    cache = KVCache(twin.model.config.num_layers, ids.shape[1])
    pieces = [
        twin.model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache).logits
        for start, end in ((0, 5), (5, 6), (6, 12))
    ]
    assert_close(torch.cat(pieces, 1)[mask.bool()], theirs[mask.bool()])


def test_layer_drop(tmp_path: Path) -> None:
    """In training blocks are left out as transformers leaves them out, with the same draws."""
    fields = {**TINY, "layerdrop": 0.5, "num_hidden_layers": 6}
    twin = make_twin(OPT, transformers.OPTForCausalLM, fields, tmp_path)
    ids = make_batch(twin.model)
    whole = twin.model(ids).logits
    twin.reference.train()
    twin.model.train()
    for seed in range(4):
        torch.manual_seed(seed)
        theirs = twin.reference(ids).logits
        torch.manual_seed(seed)
        ours = twin.model(ids).logits
        assert_close(ours, theirs)
        assert not torch.allclose(ours, whole)


def test_layer_drop_compiles() -> None:
    """The draw is part of one graph; a block that is left out gets no gradient."""
    config = OPTConfig(
        vocab_size=96, hidden_size=32, num_layers=1, num_heads=4, max_seq_len=32, layer_drop=1.0
    )
    model = OPT.from_config(config).train()
    ids = make_batch(model)
    torch.compiler.reset()
    torch.compile(model, fullgraph=True, backend="eager")(ids, labels=ids).loss.backward()
    torch.compiler.reset()
    assert not model.layers["0"].mlp.up_proj.weight.grad.any()
    assert model.embed.weight.grad.any()


def test_published_config_and_old_names(tmp_path: Path) -> None:
    """The fields of facebook/opt-350m's config.json open, and `decoder.` names with a head."""
    raw = {
        **TINY_350M,
        "_name_or_path": "opt-350m",
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "dropout": 0.1,
        "eos_token_id": 2,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "model_type": "opt",
        "pad_token_id": 1,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "transformers_version": "4.20.0.dev0",
        "use_cache": True,
    }
    config = OPTConfig.from_hf(raw)
    assert config.dropout == 0.1
    assert OPTConfig.from_hf(
        {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
    ).dropout
    model = OPT.from_config(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    old["lm_head.weight"] = old["decoder.embed_tokens.weight"].clone()
    save_file(old, file)
    again = OPT.from_pretrained(tmp_path)
    assert_equal_trees(again.state_dict(), model.state_dict())
    assert again.config == model.config


@pytest.mark.parametrize(
    "wrong", [{"pad_token_id": 96}, {"norm_eps": 1e-6}, {"num_heads": 5}, {"num_kv_heads": 2}]
)
def test_contradictions(wrong: dict[str, Any]) -> None:
    """What cannot be, or cannot be saved, raises with its name."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_heads": 4}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OPTConfig(**{**sizes, **wrong})


COUNTS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
}


@pytest.mark.parametrize("name", list(OPTConfig.presets))
def test_preset_sizes(name: str) -> None:
    """transformers' counts of the published configs (facebook/opt-*)."""
    assert count_preset(OPT, name) == COUNTS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTConfig.presets))
def test_every_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    check_preset_shapes(OPT, transformers.OPTForCausalLM, name)
