"""Groups, optimizers, Muon and clipping on one process, against torch's own."""

import copy
import json

import pytest
import torch
from torch import nn

from bmforge.config import config_from_dict, config_to_dict
from bmforge.errors import ConfigError
from bmforge.train.optim.build import (
    Muon,
    OptimConfig,
    OptimGroup,
    build_optimizers,
    clip_grad_norm_,
    param_groups,
)


class Tiny(nn.Module):
    """Every kind of parameter that the grouping knows."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({"0": nn.Linear(6, 9), "1": nn.Linear(9, 6, bias=False)})
        self.norm = nn.LayerNorm(6)
        self.expert_bias = nn.Parameter(torch.zeros(2, 3))
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_no_decay_on_norms_biases_and_vectors():
    groups = param_groups(Tiny(), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert names(groups) == [
        ["embed.weight", "layers.0.weight", "layers.1.weight"],
        ["expert_bias", "layers.0.bias", "norm.weight", "norm.bias"],
    ]


def test_frozen_parameters_are_left_out_and_empty_groups_too():
    model = Tiny(tied=False)
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    assert names(param_groups(model, 0.1)) == [["norm.weight", "norm.bias"]]
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable"):
        build_optimizers(model, OptimConfig())


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_only(tied):
    muon, adamw = build_optimizers(Tiny(tied), OptimConfig("muon", lr=0.1, muon_lr=0.2))
    assert [g["param_names"] for g in muon.param_groups] == [["layers.0.weight", "layers.1.weight"]]
    rest = ["embed.weight"] if tied else ["embed.weight", "lm_head.weight"]
    assert [g["param_names"] for g in adamw.param_groups] == [
        rest,
        ["expert_bias", "layers.0.bias", "norm.weight", "norm.bias"],
    ]
    assert [g["base_lr"] for g in muon.param_groups + adamw.param_groups] == [0.2, 0.1, 0.1]


def test_groups_by_name_have_their_own_numbers():
    own = (OptimGroup("layers.0.**", lr=0.3), OptimGroup("**.weight", weight_decay=0.0))
    (adamw,) = build_optimizers(Tiny(), OptimConfig(lr=0.1, weight_decay=0.2, groups=own))
    found = {
        name: (group["lr"], group["base_lr"], group["weight_decay"])
        for group in adamw.param_groups
        for name in group["param_names"]
    }
    assert found == {
        "layers.0.weight": (0.3, 0.3, 0.2),
        "layers.0.bias": (0.3, 0.3, 0.0),
        **dict.fromkeys(["embed.weight", "layers.1.weight", "norm.weight"], (0.1, 0.1, 0.0)),
        **dict.fromkeys(["norm.bias", "expert_bias"], (0.1, 0.1, 0.0)),
    }
    muon, _ = build_optimizers(Tiny(), OptimConfig("muon", lr=0.1, muon_lr=0.2, groups=own))
    assert [g["base_lr"] for g in muon.param_groups] == [0.3, 0.2]


def test_groups_with_a_rate_of_their_own_equal_torch():
    model = Tiny()
    twin = copy.deepcopy(model)
    own = (OptimGroup("layers.**", lr=0.5),)
    ours = build_optimizers(model, OptimConfig("sgd", lr=0.1, weight_decay=0.0, groups=own))
    inside = [p for n, p in twin.named_parameters() if n.startswith("layers")]
    beside = [p for n, p in twin.named_parameters() if not n.startswith("layers")]
    groups = [{"params": inside, "lr": 0.5}, {"params": beside, "lr": 0.1}]
    expected = train(twin, [torch.optim.SGD(groups, momentum=0.9)])
    for name, parameter in train(model, ours).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def test_groups_are_in_the_record_and_must_name_something():
    config = OptimConfig(groups=(OptimGroup("norm.*", lr=0.1),))
    record = json.loads(json.dumps(config.to_record()))
    config.check_same(record)
    OptimConfig().check_same({n: v for n, v in OptimConfig().to_record().items() if n != "groups"})
    with pytest.raises(ConfigError, match=r"optim\.groups"):
        OptimConfig().check_same(record)
    assert config_from_dict(OptimConfig, config_to_dict(config)) == config
    with pytest.raises(ConfigError, match=r"parameter pattern .nrom\.\*. matches nothing"):
        build_optimizers(Tiny(), OptimConfig(groups=(OptimGroup("nrom.*", lr=0.1),)))
    with pytest.raises(ConfigError, match="has no effect"):
        OptimGroup("norm.*")
    with pytest.raises(ConfigError, match="weight_decay=-1"):
        OptimGroup("norm.*", weight_decay=-1.0)


def test_muon_leaves_embedding_modules_of_any_name_to_adamw():
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 4)})
    muon, _ = build_optimizers(model, OptimConfig("muon"))
    assert muon.param_groups[0]["param_names"] == ["fc.weight"]
    with pytest.raises(ConfigError, match="hidden matrices"):
        build_optimizers(nn.Embedding(5, 4), OptimConfig("muon"))


def train(model, optimizers, steps=3):
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(
                    parameter.shape, generator=draw, dtype=torch.float64
                ).to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return dict(model.named_parameters())


def test_adamw_is_fused_and_equals_torch():
    model = Tiny()
    twin = copy.deepcopy(model)
    config = OptimConfig(lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    (ours,) = build_optimizers(model, config)
    assert all(group["fused"] for group in ours.param_groups)
    decay = [p for n, p in twin.named_parameters() if p.dim() == 2 and n != "expert_bias"]
    rest = [p for n, p in twin.named_parameters() if p.dim() != 2 or n == "expert_bias"]
    theirs = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    expected = train(twin, [theirs])
    for name, parameter in train(model, [ours]).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def test_sgd_equals_torch():
    model = Tiny()
    twin = copy.deepcopy(model)
    optimizers = build_optimizers(model, OptimConfig("sgd", lr=0.1, weight_decay=0.0))
    expected = train(twin, [torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)])
    for name, parameter in train(model, optimizers).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_equals_torch_bit_for_bit(dtype, adjust):
    model = nn.Sequential(nn.Linear(7, 12, False), nn.Linear(12, 5, False), nn.Linear(5, 5, False))
    model.to(dtype)
    twin = copy.deepcopy(model)
    ours = Muon(model.parameters(), lr=0.02, weight_decay=0.1, adjust_lr=adjust, ns_dtype="bf16")
    theirs = torch.optim.Muon(twin.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
    expected = train(twin, [theirs])
    for name, parameter in train(model, [ours]).items():
        assert torch.equal(parameter, expected[name]), name


def test_muon_in_float64_has_singular_values_near_one():
    parameter = nn.Parameter(torch.zeros(8, 5, dtype=torch.float64))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0, adjust_lr="original")
    parameter.grad = torch.randn(8, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
    optimizer.step()
    update = -parameter.detach() / (8 / 5) ** 0.5
    middle = left.T @ update @ right.T
    assert torch.all((middle.diagonal() > 0.5) & (middle.diagonal() < 1.5))
    off_diagonal = middle - middle.diagonal().diag()
    torch.testing.assert_close(off_diagonal, torch.zeros_like(middle), rtol=0, atol=1e-12)


def test_muon_state_goes_on_after_loading():
    model = nn.Linear(4, 6, bias=False)
    optimizer = Muon(model.parameters(), lr=0.1)
    train(model, [optimizer], 2)
    twin = copy.deepcopy(model)
    resumed = Muon(twin.parameters(), lr=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(
        train(model, [optimizer])["weight"].detach(), train(twin, [resumed])["weight"].detach()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, "Did you mean 'adamw'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"name": "muon", "momentum": 1.0}, "momentum=1.0"),
        ({"name": "muon", "ns_steps": 0}, "ns_steps=0"),
        ({"momentum": 0.9}, "momentum=0.9 has no effect"),
        ({"muon_lr": 0.1}, "muon_lr=0.1 has no effect"),
        ({"name": "sgd", "eps": 1e-6}, "eps=1e-06 has no effect"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**settings)


def test_muon_refuses_vectors():
    with pytest.raises(ConfigError, match=r"shape=\(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_equals_torch(dtype, max_norm):
    model = Tiny().to(dtype)
    train(model, [])
    model.norm.bias.grad = None
    twin = copy.deepcopy(model)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        b.grad = None if a.grad is None else a.grad.clone()
    ours = clip_grad_norm_(model.parameters(), max_norm)
    theirs = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    assert float(ours) == pytest.approx(float(theirs), rel=tolerance)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=0)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_measuring_changes_nothing():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], None) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    parameter.grad = torch.tensor([3.0, float("nan")])
    assert clip_grad_norm_([parameter], 1.0).isnan()
    assert clip_grad_norm_([], 1.0) == 0.0
    with pytest.raises(ConfigError, match="max_norm=0"):
        clip_grad_norm_([parameter], 0)
