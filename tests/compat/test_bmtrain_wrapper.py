"""BMTrainModelWrapper over Hugging Face models: same numbers, ties, every repeated block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import old_programs as old
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import bmforge.compat.bmtrain as bmt
from bmforge.errors import ConfigError
from bmforge.shards import local_tensor
from bmforge.testing import run_distributed

TINY: dict[str, Any] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_ctx": 16}),
    "bert": (
        BertForMaskedLM,
        BertConfig,
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config,
        {
            **{"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32},
            **{"decoder_start_token_id": 0, "pad_token_id": 0},
        },
    ),
}
BLOCKS = {"gpt2": 2, "bert": 2, "llama": 1, "t5": 4}


def build(name: str) -> Any:
    model_class, config_class, sizes = TINY[name]
    dropless = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    dropless |= {"bert": none, "t5": {"dropout_rate": 0.0}, "llama": {}}
    wide = {} if name == "t5" else {"intermediate_size": 32} if name != "gpt2" else {}
    torch.manual_seed(3)
    config = config_class(vocab_size=64, **sizes, **wide, **dropless[name])
    return model_class(config).train()


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(step))


def train_wrapped(name: str) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    bmt.init_distributed()
    model = bmt.BMTrainModelWrapper(build(name))
    blocks = [m for m in model.modules() if isinstance(m, bmt.Block)]
    assert len(blocks) == BLOCKS[name]
    optim = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optim)
    losses = []
    for step in range(3):
        ids = ids_of(step).chunk(bmt.world_size())[bmt.rank()]
        loss = model(input_ids=ids, labels=ids).loss
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    sharded = [isinstance(b._module, FSDPModule) for b in blocks]
    return losses, model.state_dict(), sharded


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("world", [1, 2])
def test_a_wrapped_model_trains_as_a_plain_one(name: str, world: int) -> None:
    model = build(name)
    tied = len(model.state_dict()) - len(dict(model.named_parameters()))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    want = []
    for step in range(3):
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        optim.zero_grad()
        loss.backward()
        optim.step()
        want.append(loss.item())
    assert (name == "llama") == (tied == 0)
    for losses, state, sharded in run_distributed(train_wrapped, world, name):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)
        assert list(state) == list(model.state_dict())
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-5)
        assert all(sharded) == (world > 1)


def logits_and_ties() -> None:
    bmt.init_distributed()
    plain, model = build("gpt2").eval(), bmt.BMTrainModelWrapper(build("gpt2").eval())
    with torch.no_grad():
        got, want = (m(input_ids=ids_of(0), output_hidden_states=True) for m in (model, plain))
    assert torch.equal(got.logits, want.logits)
    assert len(got.hidden_states) == 3
    assert all(map(torch.equal, got.hidden_states, want.hidden_states))
    table = model.transformer.wte._parameters["weight"]
    assert table is model.lm_head._parameters["weight"]
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    made = model.generate(ids_of(0)[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(made, plain.generate(ids_of(0)[:1], max_new_tokens=3, pad_token_id=0))


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_logits_and_ties(world: int) -> None:
    run_distributed(logits_and_ties, world)


def blocks_that_share() -> None:
    """A weight that two blocks have, and one that a block shares with the outside."""
    bmt.init_distributed()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
    layers[1].weight = layers[0].weight
    plain = torch.nn.Sequential(*layers)
    want = plain(torch.ones(2, 4)).detach()
    model = torch.nn.ModuleDict({"layers": layers})
    bmt.BMTrainModelWrapper(model)
    x = torch.ones(2, 4)
    for layer in model["layers"]:
        x = layer(x)
    torch.testing.assert_close(x, want)
    tables = [layer._parameters["weight"] for layer in model["layers"]]
    assert tables[0] is tables[1]
    assert [isinstance(layer, bmt.Block) for layer in model["layers"]] == [False, False, True]


@pytest.mark.parametrize("world", [1, 2])
def test_blocks_that_share_a_weight_stay_tied(world: int) -> None:
    run_distributed(blocks_that_share, world)


def shares(model: torch.nn.Module) -> int:
    """Bytes of what is here of all parameters."""
    return sum(local_tensor(p.detach()).untyped_storage().nbytes() for p in model.parameters())


def load_from_meta(name: str, file: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    bmt.init_distributed()
    model_class = TINY[name][0]
    with torch.device("meta"):
        plain = model_class(build(name).config).eval()
    model = bmt.BMTrainModelWrapper(plain)
    with pytest.raises(ConfigError, match=r"no values.*bmt\.load"):
        model(input_ids=ids_of(0), labels=ids_of(0))
    with pytest.raises(ConfigError, match="no values"):
        model.state_dict()
    bmt.load(model, file)
    all_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        logits = model(input_ids=ids_of(0), labels=ids_of(0)).logits
    for block in (m for m in model.modules() if isinstance(m, bmt.Block)):
        block.give_back()
    return logits, model.state_dict(), shares(model) / all_bytes


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_on_meta_is_loaded_share_by_share(name: str, world: int, tmp_path: Path) -> None:
    model, file = build(name).eval(), tmp_path / "model.pt"
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        want = model(input_ids=ids_of(0), labels=ids_of(0)).logits
    for logits, state, part in run_distributed(load_from_meta, world, name, str(file)):
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        assert part < 1.1 / world


class Tabled(torch.nn.Module):
    """A table of positions that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def tables_on_meta() -> None:
    bmt.init_distributed()
    with torch.device("meta"):
        model = Tabled()
    with pytest.raises(ConfigError, match=r"buffers \.?table .*include_buffers=False"):
        bmt.BMTrainModelWrapper(model)


def test_a_table_that_nobody_makes_is_named() -> None:
    run_distributed(tables_on_meta, 1)


def drawn_from_meta() -> dict[str, torch.Tensor]:
    """A program's own modules, made on meta and drawn."""
    bmt.init_distributed(seed=3)
    with torch.device("meta"):
        model = old.OldGPT()
    torch.manual_seed(3)
    bmt.init_parameters(model)
    return model.state_dict()


@pytest.mark.parametrize("world", [1, 2])
def test_modules_on_meta_are_drawn_as_torch_draws(world: int) -> None:
    torch.manual_seed(3)
    want = old.PlainGPT().state_dict()
    for state in run_distributed(drawn_from_meta, world):
        assert all(torch.equal(state[key], want[key]) for key in want)
