"""The old layers: models built of them have the numbers of transformers' with the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center import layer
from bmforge.errors import ConfigError
from bmforge.parallel import shutdown_distributed
from bmforge.testing.pool import run_distributed

IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
SHOWN = torch.arange(9)[None] < torch.tensor([9, 6])[:, None]
SQUARE = SHOWN[:, :, None] & SHOWN[:, None, :]
CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
HEADS = {"num_heads": 4, "dim_head": 8}
SIZES = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 50}


@pytest.fixture(autouse=True)
def joined() -> Iterator[None]:
    bmt.init_distributed(seed=0)
    yield
    shutdown_distributed()


def fill(module: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights by the old names; each must be there."""
    wanted = module.state_dict()
    assert set(wanted) == set(weights)
    module.load_state_dict(weights)


def drawn(model: Any) -> Any:
    """Return one of their models with weights in which nothing is 0."""
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.3)
    return model.eval()


def linear(weights: dict[str, Tensor], theirs: Any, name: str) -> None:
    weights[f"{name}.weight"] = theirs.weight
    if getattr(theirs, "bias", None) is not None:
        weights[f"{name}.bias"] = theirs.bias


def test_bert() -> None:
    """Post-norm: each norm belongs to what follows it."""
    config = hf.BertConfig(**SIZES, intermediate_size=64, attn_implementation="eager")
    theirs = drawn(hf.BertModel(config))
    options = {"norm_bias": True, "att_bias": True, "ffn_bias": True, "ffn_activate_fn": "gelu"}
    ours = layer.Encoder(
        2, 32, 64, **HEADS, **options, norm_eps=1e-12, attn_scale=True, post_layer_norm=True
    )
    weights: dict[str, Tensor] = {}
    before = theirs.embeddings.LayerNorm
    for n, block in enumerate(theirs.encoder.layer):
        at = f"layers.{n}"
        linear(weights, before, f"{at}.self_att.layernorm_before_attention")
        for a, b in {"q": "query", "k": "key", "v": "value"}.items():
            name = f"{at}.self_att.self_attention.project_{a}"
            linear(weights, getattr(block.attention.self, b), name)
        out = block.attention.output
        linear(weights, out.dense, f"{at}.self_att.self_attention.attention_out")
        linear(weights, out.LayerNorm, f"{at}.ffn.layernorm_before_ffn")
        linear(weights, block.intermediate.dense, f"{at}.ffn.ffn.w_in.w")
        linear(weights, block.output.dense, f"{at}.ffn.ffn.w_out")
        before = block.output.LayerNorm
    linear(weights, before, "output_layernorm")
    fill(ours, weights)
    wanted = theirs(IDS, SHOWN.long()).last_hidden_state[SHOWN]
    e = theirs.embeddings
    x = (
        e.word_embeddings(IDS)
        + e.position_embeddings.weight[:9]
        + e.token_type_embeddings.weight[0]
    )
    torch.testing.assert_close(ours(x, SQUARE)[SHOWN], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["relu", "gated-gelu"])
def test_t5(kind: str) -> None:
    """Encoder and decoder, relative positions, no scale, root-mean-square norms."""
    config = hf.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj=kind,
    )  # fmt: skip
    theirs = drawn(hf.T5Model(config))
    activation = {"relu": "relu", "gated-gelu": "gated_gelu_new"}[kind]
    options = {"norm_eps": 1e-6, "pos_bias_type": "relative", "ffn_activate_fn": activation}
    encoder = layer.Encoder(2, 32, 64, **HEADS, **options)
    decoder = layer.Decoder(2, 32, 64, **HEADS, **options)
    biases = [
        layer.RelativePositionEmbedding(4, bidirectional=both, num_buckets=32, max_distance=128)
        for both in (True, False)
    ]
    for stack, ours, bias in (
        (theirs.encoder, encoder, biases[0]),
        (theirs.decoder, decoder, biases[1]),
    ):
        weights: dict[str, Tensor] = {}
        for n, block in enumerate(stack.block):
            at = f"layers.{n}"
            for part, name in zip(block.layer[:-1], ("self_att", "cross_att"), strict=False):
                linear(weights, part.layer_norm, f"{at}.{name}.layernorm_before_attention")
                attn = getattr(part, "SelfAttention", None) or part.EncDecAttention
                for a in "qkv":
                    linear(weights, getattr(attn, a), f"{at}.{name}.self_attention.project_{a}")
                linear(weights, attn.o, f"{at}.{name}.self_attention.attention_out")
            dense = block.layer[-1].DenseReluDense
            linear(weights, block.layer[-1].layer_norm, f"{at}.ffn.layernorm_before_ffn")
            inner = {"wi": "w"} if kind == "relu" else {"wi_0": "w_0", "wi_1": "w_1"}
            for a, b in inner.items():
                linear(weights, getattr(dense, a), f"{at}.ffn.ffn.w_in.{b}")
            linear(weights, dense.wo, f"{at}.ffn.ffn.w_out")
        linear(weights, stack.final_layer_norm, "output_layernorm")
        fill(ours, weights)
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        fill(bias, {"relative_attention_bias": table})
    wanted = theirs(
        input_ids=IDS, attention_mask=SHOWN.long(), decoder_input_ids=IDS.flip(1)
    ).last_hidden_state
    source = encoder(theirs.shared(IDS), SQUARE, biases[0](9, 9))
    cross = SHOWN[:, None, :].expand(2, 9, 9)
    causal, places = CAUSAL.expand(2, 9, 9), torch.arange(9)
    found = decoder(theirs.shared(IDS.flip(1)), causal, biases[1](places, places), source, cross)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", [-1, 2])
def test_llama_with_and_without_a_cache(kv: int) -> None:
    heads = 4 if kv == -1 else kv
    config = hf.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=heads)
    theirs = drawn(hf.LlamaModel(config))
    options = {"norm_eps": 1e-6, "pos_bias_type": "rotary", "ffn_activate_fn": "gated_silu"}
    ours = layer.Encoder(2, 32, 64, **HEADS, **options, attn_scale=True, num_heads_kv=kv)
    weights: dict[str, Tensor] = {}
    for n, block in enumerate(theirs.layers):
        at = f"layers.{n}"
        linear(weights, block.input_layernorm, f"{at}.self_att.layernorm_before_attention")
        for a in "qkv":
            name = f"{at}.self_att.self_attention.project_{a}"
            linear(weights, getattr(block.self_attn, f"{a}_proj"), name)
        linear(weights, block.self_attn.o_proj, f"{at}.self_att.self_attention.attention_out")
        linear(weights, block.post_attention_layernorm, f"{at}.ffn.layernorm_before_ffn")
        linear(weights, block.mlp.gate_proj, f"{at}.ffn.ffn.w_in.w_0")
        linear(weights, block.mlp.up_proj, f"{at}.ffn.ffn.w_in.w_1")
        linear(weights, block.mlp.down_proj, f"{at}.ffn.ffn.w_out")
    linear(weights, theirs.norm, "output_layernorm")
    fill(ours, weights)
    x, turn, causal = theirs.embed_tokens(IDS), layer.RotaryEmbeddingESM(8), CAUSAL.expand(2, 9, 9)
    wanted = theirs(IDS).last_hidden_state
    torch.testing.assert_close(ours(x, causal, turn), wanted, rtol=1e-4, atol=1e-4)
    first, past = ours(x[:, :5], causal[:, :5, :5], turn, use_cache=True)
    rest, _ = ours(x[:, 5:], causal[:, 5:], turn, use_cache=True, past_key_values=past)
    torch.testing.assert_close(torch.cat((first, rest), 1), wanted, rtol=1e-4, atol=1e-4)


def test_gptj_reads_the_same_twice() -> None:
    """Attention and MLP side by side, and neighbouring features turned."""
    config = hf.GPTJConfig(
        vocab_size=50, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_inner=64,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = drawn(hf.GPTJModel(config))
    block = theirs.h[0]
    options = {"norm_bias": True, "ffn_bias": True, "ffn_activate_fn": "gelu_new"}
    ours = layer.TransformerBlock(
        32, 64, 4, 8, **options, pos_bias_type="rotary", attn_scale=True, parallel_ffn=True
    )
    weights: dict[str, Tensor] = {}
    linear(weights, block.ln_1, "self_att.layernorm_before_attention")
    linear(weights, block.ln_1, "ffn.layernorm_before_ffn")
    for a in "qkv":
        linear(weights, getattr(block.attn, f"{a}_proj"), f"self_att.self_attention.project_{a}")
    linear(weights, block.attn.out_proj, "self_att.self_attention.attention_out")
    linear(weights, block.mlp.fc_in, "ffn.ffn.w_in.w")
    linear(weights, block.mlp.fc_out, "ffn.ffn.w_out")
    fill(ours, weights)
    x = theirs.wte(IDS)
    found = ours(x, CAUSAL.expand(2, 9, 9), layer.RotaryEmbedding(4))
    wanted = theirs(IDS).last_hidden_state
    torch.testing.assert_close(theirs.ln_f(found), wanted, rtol=1e-4, atol=1e-4)


def test_a_query_that_may_look_nowhere_gets_nothing() -> None:
    """And no gradient of it is NaN, with a trained bias and without."""
    for kind in ("none", "relative"):
        attention = layer.Attention(16, 4, 4, pos_bias_type=kind)
        bmt.init_parameters(attention)
        bias = torch.zeros(4, 5, 5, requires_grad=True)
        mask = torch.ones(2, 5, 5, dtype=torch.bool)
        mask[0, 3] = False
        x = torch.randn(2, 5, 16, requires_grad=True)
        out = attention(x, x, mask, bias)
        out.sum().backward()
        assert torch.equal(out[0, 3], torch.zeros(16))
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        q, k, v = (p(x) for p in (attention.project_q, attention.project_k, attention.project_v))
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT).masked_fill(~mask[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
        wanted = attention.attention_out((scores @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


def test_drawn_as_torch_draws() -> None:
    """In the order of modules, from torch's generator; norms and biases are constant."""
    torch.manual_seed(3)
    block = layer.FeedForward(6, 10, bias=True, activate_fn="gated_relu")
    bmt.init_parameters(block)
    torch.manual_seed(3)
    for name in ("w_in.w_0", "w_in.w_1", "w_out"):
        wanted = torch.empty_like(block.get_submodule(name).weight)
        torch.nn.init.normal_(wanted, 0.0, 0.02)
        assert torch.equal(block.get_submodule(name).weight, wanted)
        assert not block.get_submodule(name).bias.any()
    norm = layer.LayerNorm(6, bias=False, init_var=2.0)
    bmt.init_parameters(norm)
    assert torch.equal(norm.weight, torch.full((6,), 2.0))


def test_scales_of_length() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    for before in (False, True):
        made = layer.Linear(16, 4, length_scale=True, length_scale_before=before, bias=True)
        bmt.init_parameters(made)
        torch.nn.init.normal_(made.bias)
        wanted = x @ made.weight.T / 4 + made.bias
        torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-6)
    table = layer.Embedding(20, 16, length_scale=True, padding_idx=3)
    bmt.init_parameters(table)
    assert not table.weight[3].any()
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(table(ids), table.weight[ids] / 4)
    torch.testing.assert_close(table.projection(x), F.linear(x / 4, table.weight))


def test_segments_have_a_row_for_every_pair() -> None:
    """In one segment the distance counts, between two the pair does."""
    made = layer.SegmentPositionEmbedding(2, num_segments=3, num_buckets=4, max_distance=8)
    bmt.init_parameters(made)
    table = made.relative_attention_bias
    places = torch.arange(3)[None]
    segments = torch.tensor([[0, 0, 2]])
    found = made(places, places, segments, segments)[0]
    rows = torch.tensor([[0, 0, 4 + 2], [1, 0, 4 + 2], [4 + 6, 4 + 6, 0]])
    assert torch.equal(found, table[rows].permute(2, 0, 1))


@pytest.mark.parametrize("has_globals", [False, True])
def test_window_and_tokens_that_see_all(has_globals: bool) -> None:
    """Against scores written out: a window of 4, tokens 0 and 5 global, the last two padding."""
    torch.manual_seed(0)
    made = layer.SparseSelfAttention(4, dim_in=6, dim_head=3, num_heads=2, bias=True)
    bmt.init_parameters(made)
    x = torch.randn(1, 11, 6)
    marks = torch.zeros(1, 11)
    marks[0, 9:] = -10000.0
    if has_globals:
        marks[0, [0, 5]] = 10000.0
    values = dict(made.state_dict())

    def project(name: str) -> torch.Tensor:
        y = x[0] @ values[f"{name}.weight"].T + values[f"{name}.bias"]
        return y.unflatten(-1, (2, 3)).transpose(0, 1)

    def mix(kind: str, allowed: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(f"project_{part}{kind}") for part in "qkv")
        scores = (q @ k.transpose(1, 2) / 3**0.5).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1).flatten(1)

    real, chosen = marks[0] >= 0, marks[0] > 0
    places = torch.arange(11)
    near = (places[:, None] - places).abs() <= 2
    mixed = mix("", (near | chosen) & real & real[:, None])
    mixed = torch.where(chosen[:, None], mix("_global", real.expand(11, -1)), mixed)
    wanted = mixed @ values["attention_out.weight"].T + values["attention_out.bias"]
    found = made(x, marks)[0]
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert made.project_q.weight.grad.abs().sum() > 0
    stack = layer.Encoder(1, 6, 8, 2, 3, sparse_attention=True, attention_window=4)
    bmt.init_parameters(stack)
    assert stack(x, marks).shape == x.shape


def test_images_to_patches() -> None:
    made = layer.PatchEmbedding(8, 4, 3, 10)
    bmt.init_parameters(made)
    image = torch.randn(2, 3, 8, 8)
    found = made(image)
    corner = made.proj(image)[:, :, 0, 0] + made.pos_embed[:, 1]
    assert found.shape == (2, 5, 10)
    torch.testing.assert_close(found[:, 1], corner)
    first = (made.cls_token + made.pos_embed)[0, 0]
    torch.testing.assert_close(found[:, 0], first.expand(2, -1))


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="int8"):
        layer.Linear(4, 4, int8=True)
    with pytest.raises(ConfigError, match="supported: none, relative, rotary"):
        layer.Attention(4, 2, 2, pos_bias_type="alibi")
    with pytest.raises(ConfigError, match="Did you mean 'gelu'"):
        layer.FeedForward(4, 4, activate_fn="gated_gleu")
    with pytest.raises(ConfigError, match="must be even"):
        layer.SparseSelfAttention(3, dim_in=4, dim_head=2, num_heads=2)
    with pytest.raises(ConfigError, match="must have 2 entries"):
        layer.Encoder(2, 4, 4, 2, 2, mask_modules=[(0, 1)])
    pruned = layer.Encoder(2, 4, 4, 2, 2, mask_modules=[(0, 1), (1, 0)])
    names = {name.rsplit(".", 2)[0] for name in pruned.state_dict()}
    assert not any(name.startswith(("layers.0.ffn", "layers.1.self_att")) for name in names)


def train_encoder(steps: int) -> list[float]:
    """Losses of a model of the old layers on this process's half of the batch."""
    bmt.init_distributed(seed=1)
    embed, encoder = layer.Embedding(20, 16), layer.Encoder(2, 16, 32, 2, 8)
    model = torch.nn.ModuleList([embed, encoder])
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    ids = torch.arange(32).view(4, 8) % 20
    ids = ids[bmt.rank() :: bmt.world_size()]
    losses = []
    for _ in range(steps):
        mask = torch.ones(8, 8, dtype=torch.bool).tril().expand(len(ids), 8, 8)
        logits = embed.projection(encoder(embed(ids), mask))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    return losses


def test_two_processes_train_as_one() -> None:
    alone = train_encoder(4)
    for losses in run_distributed(train_encoder, 2, 4):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]
