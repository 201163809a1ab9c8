"""BMCook's programs: what a config puts into a model, what a call minimises, what files hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compat import bmcook
from bmforge.compat.bmcook import BMPrune, ConfigParser, CookTrainer
from bmforge.compat.bmcook.config import recipe_from_bmcook
from bmforge.compress import CompressConfig
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.models import GPT2, GPT2Config
from bmforge.testing import assert_close

VOCAB = 31
LOSS = torch.nn.CrossEntropyLoss(ignore_index=-100)
HIDDEN = "[post]encoder.layers.0.ffn:[post]encoder.layers.1.ffn"


def make_model(seed: int = 0, **fields: Any) -> GPT2:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    config = GPT2Config(
        **{**sizes, "max_seq_len": 16, "dropout": 0.0, "attn_dropout": 0.0, **fields}
    )
    return GPT2.from_config(config, seed=seed).train()


def write_config(folder: Path, **sections: Any) -> ConfigParser:
    file = folder / "cook.json"
    file.write_text(json.dumps(sections))
    return ConfigParser(str(file))


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (3, 8), generator=generator)
    targets = torch.randint(VOCAB, (3, 8), generator=generator)
    targets[0, :3] = -100
    return ids, targets


def train(model: Any, optimizer: Any, steps: int = 3) -> list[Any]:
    ids, targets = make_batch()
    outs = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = CookTrainer.forward(model, LOSS, targets, input_ids=ids)
        out.loss.backward()
        optimizer.step()
        outs.append(out)
    return outs


def test_distillation(tmp_path: Path) -> None:
    """Logits and hidden states, by the formulas; a projection is in the optimizer."""
    model, teacher = make_model(), make_model(1, hidden_size=24)
    plain = copy.deepcopy(model)
    section = {
        "ce_scale": 0.5,
        "ce_temp": 2,
        "mse_hidn_scale": 3,
        "mse_hidn_module": [HIDDEN],
        "mse_hidn_proj": True,
    }
    config = write_config(tmp_path, distillation=section)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    CookTrainer.set_compression(config, model, optimizer, teacher)
    ids, targets = make_batch()
    out = CookTrainer.forward(model, LOSS, targets, input_ids=ids)
    assert len(optimizer.param_groups) == 2
    (projection,) = optimizer.param_groups[1]["params"]
    states = {}
    for name, one, layer in (("mine", plain, "0"), ("theirs", teacher, "1")):
        hook = one.layers[layer].mlp.register_forward_hook(
            lambda m, a, o, name=name: states.update({name: o})
        )
        logits = one(input_ids=ids).logits
        states[f"{name} logits"] = logits
        hook.remove()
    kept = targets != -100
    kl = F.kl_div(
        F.log_softmax(states["mine logits"][kept] / 2, -1),
        F.log_softmax(states["theirs logits"][kept] / 2, -1),
        log_target=True,
        reduction="batchmean",
    )
    mine, theirs = states["mine"], states["theirs"] @ projection.T
    rows = [
        (m / m.norm(dim=-1).mean() - t / t.norm(dim=-1).mean()).square().mean()
        for m, t in zip(mine, theirs, strict=True)
    ]
    want = 0.5 * 4 * kl + 3 * torch.stack(rows).mean()
    assert_close(out.d_loss.detach(), want.detach())
    task = LOSS(states["mine logits"].flatten(0, 1), targets.flatten())
    assert_close(out.loss.detach(), (task + want).detach())
    before = projection.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(projection, before)


def test_several_models_and_masks(tmp_path: Path) -> None:
    """Each with its own zeros, which stay through steps; a file of them makes them again."""
    pruning = {"is_pruning": True, "pruned_module": ["ffn.ffn.w_in"], "mask_method": "m4n2_1d"}
    config = write_config(tmp_path, pruning=pruning)
    models = [make_model(seed) for seed in (0, 1)]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        CookTrainer.set_compression(config, model, optimizer)
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            zeros = (parameter == 0).float().mean().item()
            if name.endswith("up_proj.weight"):
                assert zeros == 0.5
                assert set((parameter.unflatten(-1, (-1, 4)) == 0).sum(-1).flatten().tolist()) == {
                    2
                }
    bmcook.save_masks(str(tmp_path / "masks.bin"), models[0])
    masks = torch.load(tmp_path / "masks.bin", weights_only=True)
    assert set(masks) == {f"layers.{i}.mlp.up_proj.weight" for i in range(2)}
    with torch.no_grad():
        models[1].layers["0"].mlp.up_proj.weight.fill_(1.0)
    bmcook.load_masks(str(tmp_path / "masks.bin"), models[1])
    made = models[1].layers["0"].mlp.up_proj.weight
    assert torch.equal(made != 0, masks["layers.0.mlp.up_proj.weight"])
    with pytest.raises(ConfigError, match="already pruned"):
        BMPrune.compute_mask(models[0], config)


def test_int8_and_its_file(tmp_path: Path) -> None:
    """Loss near the float one; BMCook's names and numbers in the file."""
    config = write_config(
        tmp_path, quantization={"is_quant": True, "quantized_module": ["ffn.ffn", "project_q"]}
    )
    model = make_model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    CookTrainer.set_compression(config, model, optimizer)
    (out,) = train(model, optimizer, 1)
    ids, targets = make_batch()
    want = LOSS(plain(input_ids=ids).logits.flatten(0, 1), targets.flatten())
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-2)
    bmcook.save(model, str(tmp_path / "model.pt"), mode="quant")
    tensors = torch.load(tmp_path / "model.pt", weights_only=True)
    quantised = {n.removesuffix(".weight_quant") for n in tensors if n.endswith("_quant")}
    assert quantised == {
        f"layers.{i}.{part}"
        for i in range(2)
        for part in ("attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    }
    weight = plain.layers["0"].attn.q_proj.weight
    scale = weight.abs().amax(1) / 127
    assert_close(tensors["layers.0.attn.q_proj.weight_scale"].float(), scale.detach(), rtol=1e-3)
    rows = tensors["layers.0.attn.q_proj.weight_quant"]
    assert torch.equal(rows.float(), (weight / scale[:, None]).round().detach())


def test_records_for_experts(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, MoEfication={"is_moefy": True, "first_FFN_module": ["ffn.layernorm_before_ffn"]}
    )
    model = make_model()
    CookTrainer.set_compression(config, model)
    ids, targets = make_batch()
    out = CookTrainer.forward(model, LOSS, targets, input_ids=ids)
    assert {name: tuple(t.shape) for name, t in out.moe_records.items()} == {
        f"encoder.layers.{i}.ffn.layernorm_before_ffn": (3, 8, 16) for i in range(2)
    }


def test_gates(tmp_path: Path) -> None:
    """The Lagrangian is in the loss, and gates move."""
    pruning = {
        "is_pruning": True,
        "mask_method": "sprune",
        "sprune": {"training_mask": ["num_heads", "dim_ff"], "target_sparsity": 0.5},
    }
    config = write_config(tmp_path, pruning=pruning)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    CookTrainer.set_compression(config, model, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("delta")}
    assert before
    outs = train(model, optimizer)
    assert float(outs[-1].lag_loss.detach()) != 0
    for name, value in before.items():
        assert not torch.equal(model.get_parameter(name), value)


def test_configs(tmp_path: Path) -> None:
    """Defaults at every level, both spellings, and what cannot be said."""
    old = {"is_pruning": False, "sprune": {"mask_mode": "train_mask", "fixed_mask_path": ""}}
    config = write_config(tmp_path, pruning=old)
    assert config.get("pruning")["sprune"]["is_training"] is True
    assert config.get("distillation")["ce_temp"] == 1
    config.save()
    assert ConfigParser(config.config_file).config == config.config
    for sections, said in (
        ({"prunning": {}}, "Did you mean 'pruning'"),
        ({"distillation": {"ce_scal": 1}}, "unknown key distillation.ce_scal"),
        ({"pruning": {"is_pruning": True, "mask_method": "m4n2"}}, "mask_method='m4n2'"),
        ({"distillation": {"mse_hidn_scale": 1}}, "Set distillation.mse_hidn_module"),
        (
            {"pruning": {"sprune": {"mask_mode": "fixed", "is_training": True}}},
            "cannot be used together",
        ),
    ):
        with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
            write_config(tmp_path, **sections)
    with pytest.raises(ConfigError, match="has no compression"):
        CookTrainer.forward(make_model(), LOSS, *make_batch())


def test_a_config_is_a_recipe(tmp_path: Path) -> None:
    """Everything that BMCook's sections say, in the fields of ours."""
    make_model().save_pretrained(tmp_path / "model")
    write_config(
        tmp_path,
        distillation={
            "ce_scale": 1,
            "ce_temp": 5,
            "mse_hidn_scale": 1,
            "mse_hidn_module": [HIDDEN],
        },
        pruning={
            "is_pruning": True,
            "pruned_module": ["input_embedding", "project_q"],
            "mask_method": "m4n2_2d",
            "pruning_mask_path": "x.bin",
        },
        quantization={"is_quant": True},
        bmforge={"task": "pretrain", "steps": {"weights": 3}},
    )
    values = recipe_from_bmcook(tmp_path / "cook.json", str(tmp_path / "model"))
    assert values.pop("task") == "pretrain"
    assert values.pop("steps") == {"weights": 3}
    config = config_from_dict(CompressConfig, values)
    assert config.prune is not None
    assert config.prune.pattern == "2:4-both-greedy"
    assert config.prune.where == ("embed", "layers.0.attn.q_proj", "layers.1.attn.q_proj")
    assert config.quantize is not None
    assert (config.quantize.scheme, config.quantize.training) == ("int8-dynamic", "int8-both")
    assert config.distill is not None
    assert [(loss.kind, loss.weight) for loss in config.distill.losses] == [
        ("logits", 1.0),
        ("hidden", 1.0),
    ]
    assert config.distill.losses[1].pairs == (("layers.0.mlp", "layers.1.mlp"),)
