"""A CPM-3 checkpoint of ModelCenter, against the model that ModelCenter's layers build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.layer import Embedding, Encoder, SegmentPositionEmbedding
from bmforge.compat.model_center.model import CPM3

WIDTH, HEADS, VOCAB, PROMPTS, PROMPT_LENGTH, SEGMENTS, BUCKETS = 16, 2, 40, 3, 4, 5, 32


class PlainCPM3(bmt.DistributedModule):
    """CPM-3 as ModelCenter assembles it: a prompt, tokens, biases by segment, one stack."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"embedding_size": WIDTH, "length_scale": True, "dtype": torch.float32}
        self.prompt_embedding = Embedding(PROMPTS * PROMPT_LENGTH, **sizes)
        self.input_embedding = Embedding(VOCAB, **sizes)
        self.position_bias = SegmentPositionEmbedding(
            num_heads=HEADS,
            num_segments=SEGMENTS,
            num_buckets=BUCKETS,
            max_distance=64,
            absolute_inner_segment=True,
            bidirectional=True,
            dtype=torch.float32,
        )
        self.encoder = Encoder(
            num_layers=2,
            dim_model=WIDTH,
            dim_ff=24,
            num_heads=HEADS,
            dim_head=WIDTH // HEADS,
            dtype=torch.float32,
            pos_bias_type="relative",
            length_scale=True,
            attn_scale=True,
            norm_eps=1e-6,
            ffn_activate_fn="gated_gelu",
        )

    def forward(self, ids: Tensor, length: Tensor, context: Tensor, segment: Tensor) -> Tensor:
        width = ids.shape[1]
        real = torch.arange(width) < length[:, None]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = real[:, :, None] & real[:, None, :]
        mask = mask & (context[:, None, :] | (~context[:, :, None] & causal))
        bias = self.position_bias(width, width, segment, segment)
        prompt = self.prompt_embedding(ids[:, :PROMPT_LENGTH])
        hidden = torch.cat([prompt, self.input_embedding(ids[:, PROMPT_LENGTH:])], 1)
        return self.input_embedding.projection(self.encoder(hidden, mask, bias))


@pytest.fixture
def plain(tmp_path: Path) -> PlainCPM3:
    bmt.init_distributed(seed=0)
    model = PlainCPM3()
    bmt.init_parameters(model)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.pt")
    config = {
        **{"dim_model": WIDTH, "num_heads": HEADS, "dim_head": WIDTH // HEADS, "dim_ff": 24},
        **{"num_layers": 2, "vocab_size": VOCAB, "prompt_types": PROMPTS, "half": False},
        **{"prompt_length": PROMPT_LENGTH, "segment_types": SEGMENTS},
        **{"position_bias_num_buckets": BUCKETS, "position_bias_max_distance": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model


def test_a_checkpoint_opens_with_the_numbers_of_the_layers(
    plain: PlainCPM3, tmp_path: Path
) -> None:
    model = CPM3.from_pretrained(str(tmp_path))
    ids = torch.cat([torch.arange(PROMPT_LENGTH).expand(2, -1), torch.randint(VOCAB, (2, 6))], 1)
    length = torch.tensor([10, 7])
    context = torch.arange(10).expand(2, -1) < torch.tensor([[6], [10]])
    segment = torch.where(torch.arange(10) < PROMPT_LENGTH, 0, 2).expand(2, -1)
    inputs = {"length": length, "context": context, "token_type_ids": segment}
    real = (torch.arange(10) < length[:, None])[..., None]
    found = model(input_ids=ids, **inputs, output_logits=True).logits * real
    want = plain(ids, length, context, segment) * real
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)

    found.square().sum().backward()
    want.square().sum().backward()
    ours = dict(model.model.named_parameters())
    assert not ours["embed_segments.weight"].requires_grad
    for own, old in (
        ("embed.weight", "input_embedding.weight"),
        ("embed_prompt.weight", "prompt_embedding.weight"),
        ("rel_bias.weight", "position_bias.relative_attention_bias"),
        (
            "layers.1.attn.q_proj.weight",
            "encoder.layers.1.self_att.self_attention.project_q.weight",
        ),
        ("layers.0.mlp.down_proj.weight", "encoder.layers.0.ffn.ffn.w_out.weight"),
    ):
        expected = plain.get_parameter(old).grad
        torch.testing.assert_close(ours[own].grad, expected, rtol=1e-4, atol=1e-6)
