"""Published modules of transformers, diffusers and timm, sharded as a user's own modules are.

Every one has the gradients of plain PyTorch under ZeRO-3, recomputation and offloaded activations,
or is refused before the first step with the name of a parameter or of the module.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.parallel import Layout, parallelize
from bmforge.testing import run_distributed

pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_OLD = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
}
_DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
}
# name -> (module, class, config's class or None, options, kind of input)
MODULES: dict[str, tuple[str, str, str | None, dict[str, Any], str]] = {
    name: ("transformers", name, config, options, inputs)
    for name, config, options, inputs in [
        ("LlamaForCausalLM", "LlamaConfig", _SIZES, "ids"),
        ("MistralForCausalLM", "MistralConfig", _GROUPED, "ids"),
        ("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}, "ids"),
        ("Gemma2ForCausalLM", "Gemma2Config", {**_SIZES, "head_dim": 8}, "ids"),
        ("Olmo2ForCausalLM", "Olmo2Config", _SIZES, "ids"),
        ("PhiForCausalLM", "PhiConfig", _SIZES, "ids"),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, "ids"),
        ("GPT2LMHeadModel", "GPT2Config", _OLD, "ids"),
        ("GPTJForCausalLM", "GPTJConfig", {**_OLD, "rotary_dim": 4}, "ids"),
        ("BertForMaskedLM", "BertConfig", _SIZES, "ids"),
        ("RobertaModel", "RobertaConfig", _SIZES, "ids"),
        ("ElectraModel", "ElectraConfig", _SIZES, "ids"),
        ("DebertaV2Model", "DebertaV2Config", _SIZES, "ids"),
        ("MPNetModel", "MPNetConfig", _SIZES, "ids"),
        ("T5ForConditionalGeneration", "T5Config", _T5, "pair"),
        ("BartForConditionalGeneration", "BartConfig", _BART, "pair"),
        ("ViTModel", "ViTConfig", _IMAGE, "image"),
        ("DeiTModel", "DeiTConfig", _IMAGE, "image"),
        ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, "ids"),
        ("OPTModel", "OPTConfig", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, "ids"),
        ("BloomModel", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2}, "ids"),
        ("MambaModel", "MambaConfig", {**_SIZES, "state_size": 4}, "ids"),
        ("ConvNextModel", "ConvNextConfig", {"depths": [1, 2], "hidden_sizes": [8, 16],
         "num_stages": 2}, "large"),
        ("AlbertModel", "AlbertConfig", {**_SIZES, "embedding_size": 16}, "ids"),
    ]
} | {
    "unet": ("diffusers", "UNet2DModel", None, {
        **_UNET,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }, "timed"),
    "unet-condition": ("diffusers", "UNet2DConditionModel", None, {
        **_UNET,
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }, "conditioned"),
    "autoencoder": ("diffusers", "AutoencoderKL", None, {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 8,
    }, "picture"),
    "dit": ("diffusers", "DiTTransformer2DModel", None, {
        **_DIT, "out_channels": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4,
    }, "labeled"),
    "vit-timm": ("timm", "vit_tiny_patch16_224", None, {
        "img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4,
    }, "x"),
    "regnet-timm": ("timm", "regnety_002", None, {}, "x"),
    "convnext-timm": ("timm", "convnext_atto", None, {
        "depths": (1, 1, 2, 1), "dims": (8, 16, 16, 32),
    }, "x"),
    "resnet-timm": ("timm", "resnet18", None, {}, "x"),
    "swin-timm": ("timm", "swin_tiny_patch4_window7_224", None, {
        "img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4,
    }, "x"),
    "efficientnet-timm": ("timm", "efficientnet_b0", None, {}, "x"),
}  # fmt: skip
TRANSFORMERS = [name for name, entry in MODULES.items() if entry[0] == "transformers"]
FEW = random.Random(17).sample(TRANSFORMERS, 3)


def build(name: str) -> nn.Module:
    """Return a module of one of the libraries in fp64, without dropout."""
    library, kind, config, options, _ = MODULES[name]
    torch.manual_seed(3)
    module = importlib.import_module(library)
    if library == "timm":
        model = module.create_model(kind, num_classes=5, **options)
    elif config is None:
        model = getattr(module, kind)(**options)
    else:
        settings = getattr(module, config)(**options)
        model = getattr(module, kind)._from_config(settings, attn_implementation="eager")
    return model.double().eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    """Return four rows of inputs."""
    generator = torch.Generator().manual_seed(4)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids = torch.randint(3, 60, (4, 10), generator=generator)
    inputs: dict[str, Callable[[], dict[str, Tensor]]] = {
        "ids": lambda: {"input_ids": ids},
        "pair": lambda: {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :6].contiguous()},
        "image": lambda: {"pixel_values": noise(4, 3, 16, 16)},
        "large": lambda: {"pixel_values": noise(4, 3, 32, 32)},
        "x": lambda: {"x": noise(4, 3, 32, 32)},
        "picture": lambda: {"sample": noise(4, 3, 16, 16)},
        "timed": lambda: {"sample": noise(4, 4, 8, 8), "timestep": torch.arange(4)},
        "conditioned": lambda: {
            "sample": noise(4, 4, 8, 8),
            "timestep": torch.arange(4),
            "encoder_hidden_states": noise(4, 3, 16),
        },
        "labeled": lambda: {
            "hidden_states": noise(4, 4, 8, 8),
            "timestep": torch.arange(4),
            "class_labels": torch.arange(4),
        },
    }
    return inputs[MODULES[name][4]]()


def loss_of(out: Any) -> Tensor:
    """Return a weighted sum over the first tensor that a module returns."""
    first = out if isinstance(out, Tensor) else next(
        value for value in (out.values() if hasattr(out, "values") else out)
        if isinstance(value, Tensor)
    )  # fmt: skip
    flat = first.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return (torch.tanh(flat) * weights).sum()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def compute(name: str, options: dict[str, Any] | None) -> dict[str, Tensor] | str:
    """Return the gradients of all rows, or the text of a refusal; options None is plain PyTorch."""
    model, inputs = build(name), inputs_of(name)
    scale = 1
    if options is not None:
        rank, scale = dist.get_rank(), dist.get_world_size()
        rows = slice(rank * 4 // scale, (rank + 1) * 4 // scale)
        inputs = {key: tensor[rows] for key, tensor in inputs.items()}
        try:
            parallelize(model, Layout(zero=3), **options)
            loss = loss_of(model(**inputs))
        except ConfigError as error:
            return str(error)
    else:
        loss = loss_of(model(**inputs))
    (loss * scale).backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


OPTIONS: dict[str, dict[str, Any]] = {
    "zero": {},
    "recompute": {"recompute": True},
    "offload": {"recompute": False, "offload_activations": True},
}


def check(name: str, options: dict[str, Any]) -> bool:
    """Compare a module on two processes with plain PyTorch; return False if it is refused."""
    (want,) = run_distributed(compute, 1, name, None)
    got = run_distributed(compute, 2, name, options)
    if any(isinstance(result, str) for result in got):
        assert all(isinstance(result, str) for result in got)
        model = build(name)
        names = [type(model).__name__, *(n for n, _ in model.named_parameters())]
        assert any(n in got[0] or n.rpartition(".")[0] in got[0] for n in names), got[0]
        return False
    for result in got:
        assert result.keys() == want.keys()
        for key, gradient in want.items():
            # By norm: norms and rotary positions of transformers compute in fp32.
            off = (result[key] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert off <= 1e-6, f"{key}: {off}"
    return True


@pytest.mark.parametrize("name", FEW)
def test_modules_have_the_gradients_of_plain_pytorch(name: str) -> None:
    assert check(name, {"recompute": True, "offload_activations": False})


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("name", MODULES)
def test_all_modules_have_the_gradients_of_plain_pytorch(
    name: str, options: dict[str, Any]
) -> None:
    pytest.importorskip(MODULES[name][0])
    if not check(name, options):
        print(f"{name} is refused")
