"""CPM-2, dense and with experts, against a plain implementation of its paper and code below."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import KVCache, generate
from bmforge.models import Model
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.testing.batches import Batch, make_batch, make_labels
from bmforge.testing.capability import capability
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import count_preset
from bmforge.testing.reference_pair import to_reference_names
from bmforge.testing.tolerance import assert_close, assert_equal_trees

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_layers": 2, "num_heads": 4,
    "head_dim": 6, "num_buckets": 16, "init_std": 0.1, "eos_token_id": 7,
}  # fmt: skip


class PlainCPM2:
    """CPM-2 as its code writes it: matrices by their published names, masks as -10000.

    Args:
        weights: by the names of the published shards.
        heads: N.
        buckets: of relative positions.
    """

    def __init__(self, weights: dict[str, Tensor], heads: int, buckets: int) -> None:
        self.weights, self.heads, self.buckets = weights, heads, buckets
        self.layers = 1 + max(int(n.split(".")[2]) for n in weights if "blocks" in n)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Divide by the root of the mean square."""
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def bucket(self, distance: int, both_sides: bool) -> int:
        """Return the bucket of one distance, key minus query."""
        count, first = self.buckets, 0
        if both_sides:
            count //= 2
            first = count if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = count // 2
        if distance < exact:
            return first + distance
        far = math.log(distance / exact) / math.log(128 / exact) * (count - exact)
        return first + min(exact + int(far), count - 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | float, name: str
    ) -> Tensor:
        """Attention without a scale, head by head."""
        heads = []
        for number in range(self.heads):
            one, two, three = (t.chunk(self.heads, -1)[number] for t in (q, k, v))
            own = bias[number] if isinstance(bias, Tensor) else bias
            scores = one @ two.transpose(1, 2) * mask - 10000.0 * (1 - mask) + own
            heads.append(scores.softmax(-1) @ three)
        return torch.cat(heads, -1) @ self.weights[f"{name}.dense.weight"].T

    def feed(self, x: Tensor, name: str) -> Tensor:
        """The gated MLP, or every token's best expert."""

        def mlp(rows: Tensor, module: str) -> Tensor:
            one, two, out = (
                self.weights[f"{module}.dense_relu_dense.{part}.weight"]
                for part in ("wi_0", "wi_1", "wo")
            )
            gate = rows @ one.T
            gelu = (
                0.5 * gate * (1 + torch.tanh(0.7978845608028654 * gate * (1 + 0.044715 * gate**2)))
            )
            return (gelu * (rows @ two.T)) @ out.T

        centroids = self.weights.get(f"{name}.expert_centroids")
        if centroids is None:
            return x + mlp(self.norm(x, f"{name}.layer_norm"), name)
        rows = []
        for token in x.flatten(0, 1):
            normed = self.norm(token, f"{name}.expert_network.layer_norm")
            best = int((centroids @ normed).argmax())
            rows.append(token + mlp(normed, f"{name}.expert_network.{best}"))
        return torch.stack(rows).view_as(x)

    def run(
        self, stack: str, ids: Tensor, mask: Tensor, memory: Tensor | None, cross: Tensor | None
    ) -> Tensor:
        """Run the encoder, or the decoder with a memory."""
        x, length = self.weights["word_embeds.weight"][ids], ids.shape[1]
        table = self.weights[f"{stack}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"]
        rows = [
            [table[self.bucket(key - query, memory is None)] for key in range(length)]
            for query in range(length)
        ]
        bias = torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)
        for layer in range(self.layers):
            block = f"{stack}.blocks.{layer}"
            name = f"{block}.self_attn.self_attn"
            normed = self.norm(x, f"{block}.self_attn.layer_norm")
            q, k, v = (normed @ self.weights[f"{name}.project.weight"].T).chunk(3, -1)
            x = x + self.attend(q, k, v, mask, bias, name)
            if memory is not None and cross is not None:
                name = f"{block}.cross_attn.cross_attn"
                q = self.norm(x, f"{block}.cross_attn.layer_norm")
                q = q @ self.weights[f"{name}.project_q.weight"].T
                k, v = (memory @ self.weights[f"{name}.project_kv.weight"].T).chunk(2, -1)
                x = x + self.attend(q, k, v, cross, 0.0, name)
            x = self.feed(x, f"{block}.ff")
        return self.norm(x, f"{stack}.final_layernorm")

    def __call__(self, source: Tensor, shown: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the encoder's result."""
        seen = shown[:, None, :].to(self.weights["word_embeds.weight"])
        memory = self.run("encoder", source, seen, None, None)
        causal = torch.ones(target.shape[1], target.shape[1]).tril()[None].to(seen)
        x = self.run("decoder", target, causal, memory, seen)
        return x @ self.weights["lm_head.weight"].T, memory


class CPM2Suite(FamilySuite):
    """What both forms of CPM-2 must do."""

    model_class = CPM2

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return padded sources and targets."""
        ids = make_batch(model, batch, seed=seed)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        targets = make_batch(model, batch, 7, seed + 1)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": targets}

    def make_plain(self, model: Model) -> PlainCPM2:
        """Return the plain implementation with the model's weights, which want gradients."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        weights = to_reference_names(model, parameters)
        weights = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        return PlainCPM2(weights, model.config.num_heads, model.config.num_buckets)

    @capability("logits")
    def test_plain_logits(self, tiny: Model) -> None:
        """Logits and the encoder's result are the plain implementation's."""
        inputs = self.make_inputs(tiny)
        logits, memory = self.make_plain(tiny)(*inputs.values())
        out = tiny(**inputs)
        assert_close(out.logits, logits, atol=1e-5)
        shown = inputs["attention_mask"].bool()
        assert_close(out.encoder_last_hidden_state[shown], memory[shown], atol=1e-5)

    @capability("gradients")
    def test_plain_gradients(self, tiny: Model) -> None:
        """The loss and the gradient of every weight are the plain implementation's."""
        model = tiny.double()
        inputs = self.make_inputs(model)
        labels = make_labels(model, inputs)
        plain = self.make_plain(model)
        logits, _ = plain(*inputs.values())
        want = F.cross_entropy(logits.flatten(0, 1), labels["labels"].flatten())
        want.backward()
        loss = model(**inputs, **labels).loss
        assert_close(loss, want, rtol=1e-5)
        loss.backward()
        got = to_reference_names(model, _gradients(model.named_parameters()))
        expected = _gradients(iter(plain.weights.items()))
        assert_close(got, expected, rtol=1e-5, atol=1e-9)

    @capability("conversion")
    def test_published_names(self, tiny: Model, tmp_path: Path) -> None:
        """Saved names are the plain implementation's; copies that shards have open as well."""
        tiny.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        plain = self.make_plain(tiny).weights
        assert_equal_trees(saved, {name: tensor.detach() for name, tensor in plain.items()})
        copies = {
            f"{s}.word_embeds.weight": saved["word_embeds.weight"] for s in ("encoder", "decoder")
        }
        (tmp_path / "model.safetensors").unlink()
        torch.save({**saved, **copies}, tmp_path / "pytorch_model.bin")
        again = CPM2.from_pretrained(tmp_path)
        assert_equal_trees(again.state_dict(), tiny.state_dict())
        assert again.config == tiny.config

    @capability("generate")
    def test_generates_what_whole_targets_say(self, tiny: Model) -> None:
        """Greedy search through the cache takes the plain implementation's likeliest tokens."""
        inputs = self.make_inputs(tiny)
        del inputs["decoder_input_ids"]
        plain = self.make_plain(tiny)
        row = torch.full_like(inputs["input_ids"][:, :1], 1)
        for _ in range(6):
            logits, _ = plain(*inputs.values(), row)
            row = torch.cat((row, logits[:, -1].argmax(-1, keepdim=True)), 1)
        made = generate(tiny, **inputs, max_new_tokens=6, do_sample=False, eos_token_id=[])
        assert torch.equal(made, row)

    def test_beam_search(self, tiny: Model) -> None:
        """As many beams as there are continuations find the likeliest one of all of them."""
        inputs = self.make_inputs(tiny)
        del inputs["decoder_input_ids"]
        plain = self.make_plain(tiny)
        vocab = tiny.config.vocab_size
        options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": []}
        made = generate(tiny, **inputs, num_beams=vocab, **options)
        for number in range(2):
            source = [t[number : number + 1].expand(vocab, -1) for t in inputs.values()]
            pairs = torch.stack((torch.ones(vocab).long(), torch.arange(vocab)), 1)
            scores = plain(*source, pairs)[0].log_softmax(-1)
            total = scores[0, 0][:, None] + scores[:, 1]
            best = divmod(int(total.argmax()), vocab)
            assert made[number].tolist() == [1, *best]

    def test_cached_decode(self, tiny: Model) -> None:
        """Feeding the target in pieces gives the logits of feeding it whole."""
        inputs = self.make_inputs(tiny)
        targets = inputs.pop("decoder_input_ids")
        whole = tiny(**inputs, decoder_input_ids=targets).logits
        cache = KVCache(2, 7)
        pieces = [
            tiny(**inputs, decoder_input_ids=targets[:, start:end], cache=cache).logits
            for start, end in ((0, 3), (3, 4), (4, 7))
        ]
        assert_close(torch.cat(pieces, 1), whole)


def _gradients(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


class TestCPM2(CPM2Suite, FileSuite):
    """The models of 11 billion."""

    def tiny_config(self) -> CPM2Config:
        """Return a tiny config."""
        return CPM2Config(**TINY)


class TestCPM2Experts(CPM2Suite):
    """The one with experts; these tests take every token's best one, in training too."""

    def tiny_config(self) -> CPM2Config:
        """Return a tiny config."""
        return CPM2Config(**TINY, num_experts=3, balance_experts=False)

    @capability("expert")
    def test_expert_parallel(self, tiny: Model) -> None:
        """Experts divided over two processes are one process."""
        self.check_experts(CPM2.from_config(tiny.config.replace(num_experts=4)))

    @pytest.mark.long
    @capability("changed: expert")
    def test_changed_experts(self, tiny: Model) -> None:
        """Four experts, changed, divided over two processes."""
        four = CPM2.from_config(tiny.config.replace(num_experts=4))
        self.check_changed_experts(self.changed_config(four))


def train_steps(model: CPM2, steps: int = 40) -> list[float]:
    """Return the losses of learning two rows by heart."""
    suite = TestCPM2Experts()
    inputs = suite.make_inputs(model)
    labels = inputs["decoder_input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(inputs["input_ids"], inputs["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_experts_train_in_balance() -> None:
    """A tiny model learns; every expert has equally many tokens; centroids stay where they were."""
    model = CPM2.from_config(CPM2Config(**TINY, num_experts=4)).train()
    loads: list[list[int]] = []
    for layer in [*model.encoder.layers.values(), *model.decoder.layers.values()]:
        dispatch = layer.mlp.dispatch

        def count(x: Any, index: Any, experts: int, run: Any, dispatch: Any = dispatch) -> Any:
            loads.append(torch.bincount(index.flatten(), minlength=experts).tolist())
            return dispatch(x, index, experts, run)

        layer.mlp.dispatch = count
    before = {n: p.clone() for n, p in model.named_parameters() if "router" in n}
    losses = train_steps(model)
    assert losses[-1] < losses[0] / 3
    assert {max(load) - min(load) for load in loads} <= {0, 1}
    assert {sum(load) for load in loads} == {24, 14}
    assert len(before) == 4
    for name, parameter in model.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])
            assert parameter.grad is None


def test_balanced_training_compiles_whole() -> None:
    """The balanced assignment is one operator of the graph, forward and backward."""
    torch.compiler.reset()
    model = CPM2.from_config(CPM2Config(**TINY, num_experts=4)).train()
    inputs = TestCPM2Experts().make_inputs(model)
    inputs |= make_labels(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(**inputs).loss.backward()
    got = _gradients(model.named_parameters())
    got = {name: tensor.clone() for name, tensor in got.items()}
    model.zero_grad()
    model(**inputs).loss.backward()
    assert_close(got, _gradients(model.named_parameters()))
    torch.compiler.reset()


def test_roles_are_eva_s() -> None:
    """A family without roles refuses them."""
    model = CPM2.from_config(CPM2Config(**TINY))
    ids = make_batch(model)
    with pytest.raises(ShapeError, match="CPM2 does not support role_ids"):
        model(ids, labels=ids, role_ids=ids % 2)


def test_config_of_the_original() -> None:
    """The published model config is read as it is; what is not known is refused."""
    raw = {
        "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
        "num_decoder_layers": 24, "dropout_rate": 0.0, "feed_forward_proj": "relu",
        "init_method_std": 0.001, "initializer_factor": 1.0, "layer_norm_epsilon": 1e-06,
        "max_position_embeddings": 512, "use_cache": True,
        "use_scaled_init_for_output_weights": True, "do_dim_trick": False,
    }  # fmt: skip
    assert CPM2Config.from_hf(raw) == CPM2Config.preset("cpm2-2.1")
    with pytest.raises(ConfigError, match="do_dim_trick"):
        CPM2Config.from_hf({**raw, "do_dim_trick": True})
    with pytest.raises(ConfigError, match="num_experts=-1"):
        CPM2Config(num_experts=-1)


# The published sizes are 11 and 198 billion; the numbers are counted by hand in the test.
SIZES = {"cpm2-2.0": (26240, 0), "cpm2-2.1": (51968, 0), "cpm2-moe-198b": (51968, 32)}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """Every preset has as many parameters as its matrices, norms and tables say."""
    vocab, experts = SIZES[name]
    attention, mlp, norm = 4 * 4096 * 4096, 3 * 4096 * 10240, 4096
    layers = 24 * (3 * attention + 2 * mlp * max(experts, 1) + 2 * experts * 4096 + 5 * norm)
    tables = 2 * vocab * 4096 + 2 * 32 * 64 + 2 * norm
    assert set(CPM2Config.presets) == set(SIZES)
    assert count_preset(CPM2, name) == layers + tables


def test_published_sizes() -> None:
    """11 billion (11.1 of the Chinese one), and 198 billion with 32 experts in every block."""
    assert round(count_preset(CPM2, "cpm2-2.0") / 1e9, 1) == 11.1
    assert int(count_preset(CPM2, "cpm2-moe-198b") / 1e9) == 198
