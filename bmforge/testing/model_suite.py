"""The battery every model family must pass; adding a family is adding one small class.

    class TestGPT2(ModelSuite):
        model_class = GPT2
        hf_class = transformers.GPT2LMHeadModel
        cases = {"default": {"n_embd": 32, ...}, "untied": {...}}

Each case is the fields of a tiny transformers config. Files and errors are in `FileSuite`.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.infer import KVCache
from bmforge.models import Model, init_weights_
from bmforge.testing.tolerance import assert_close, assert_equal_trees
from bmforge.testing.twin import Twin, make_batch, make_twin, rename_to_theirs

__all__ = ["ModelSuite"]


class ModelSuite:
    """Numbers of a decoder family against transformers, for every case.

    A subclass sets `model_class`, `hf_class` and `cases`; `long_length` is the length of the
    sequences compared, beyond a scaled rotary embedding's original context where a case has one.
    """

    model_class: ClassVar[type[Model]]
    hf_class: ClassVar[Any]
    cases: ClassVar[dict[str, Mapping[str, Any]]]
    long_length: ClassVar[int] = 24

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test once per case when it asks for `case` or `twin`."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(self.cases), scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def twin(cls, case: str, tmp_path_factory: pytest.TempPathFactory) -> Twin:
        """Both models of a case."""
        directory = tmp_path_factory.mktemp(case)
        return make_twin(cls.model_class, cls.hf_class, cls.cases[case], directory)

    @pytest.fixture
    def tiny(self) -> Model:
        """A fresh model of the first case, never seen by transformers."""
        first = next(iter(self.cases.values()))
        raw = self.hf_class.config_class(**first).to_dict()
        return self.model_class.from_config(self.model_class.config_class.from_hf(raw)).eval()

    def test_logits_and_hidden_states(self, twin: Twin) -> None:
        """Every hidden state and all logits are transformers'."""
        ids = make_batch(twin.ours, length=self.long_length)
        theirs = twin.theirs(ids, output_hidden_states=True)
        ours = twin.ours(input_ids=ids, output_hidden_states=True)
        assert_close(ours.logits, theirs.logits)
        assert len(ours.hidden_states) == len(theirs.hidden_states)
        for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert_close(mine, other)
        assert torch.equal(ours.last_hidden_state, ours.hidden_states[-1])
        tail = twin.ours(ids, logits_to_keep=2).logits
        assert_close(tail, ours.logits[:, -2:])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, twin: Twin, side: str) -> None:
        """Real tokens of a padded batch have transformers' logits; padding makes no NaN."""
        ids = make_batch(twin.ours)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        mask = mask if side == "left" else mask.flip(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        theirs = twin.theirs(ids, attention_mask=mask, position_ids=positions).logits
        ours = twin.ours(ids, attention_mask=mask, position_ids=positions).logits
        assert ours.isfinite().all()
        assert_close(ours[mask.bool()], theirs[mask.bool()])

    def test_loss_and_gradients(self, twin: Twin) -> None:
        """The loss and the gradient of every weight are transformers', under its names."""
        ids = make_batch(twin.ours)
        labels = ids.clone()
        labels[0, :4] = -100
        for items in (None, 7):
            twin.theirs.zero_grad()
            twin.ours.zero_grad()
            extra = {} if items is None else {"num_items_in_batch": items}
            theirs = twin.theirs(ids, labels=labels, **extra).loss
            ours = twin.ours(ids, labels=labels, **extra).loss
            theirs.backward()
            ours.backward()
            assert_close(ours, theirs)
            assert_close(_gradients(twin.ours), _their_gradients(twin.theirs))

    def test_padded_gradients_are_finite(self, twin: Twin) -> None:
        """Rows that start with padding give finite gradients."""
        ids = make_batch(twin.ours)
        mask = torch.ones_like(ids)
        mask[0, :-1] = 0
        twin.ours.zero_grad()
        twin.ours(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        assert all(p.grad.isfinite().all() for p in twin.ours.parameters())

    def test_cached_decode(self, twin: Twin) -> None:
        """Feeding a sequence in pieces through a cache gives the logits of feeding it whole."""
        ids = make_batch(twin.ours)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for use_mask in (False, True):
            cache = KVCache(twin.ours.config.num_layers, ids.shape[1])
            pieces = []
            for start, end in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12)):
                extra = {}
                if use_mask:
                    extra = {
                        "attention_mask": mask[:, :end],
                        "position_ids": positions[:, start:end],
                    }
                pieces.append(twin.ours(ids[:, start:end], cache=cache, **extra).logits)
                assert cache.length == end
            extra = {"attention_mask": mask, "position_ids": positions} if use_mask else {}
            assert_close(torch.cat(pieces, 1), twin.ours(ids, **extra).logits)

    def test_packed_documents(self, twin: Twin) -> None:
        """Documents packed into one row, positions starting anew, give what each gives alone."""
        ids = make_batch(twin.ours, batch=1)
        lengths = (3, 5, 4)
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        packed = twin.ours(ids, document_ids=documents, position_ids=positions).logits
        alone = [twin.ours(piece).logits for piece in ids.split(lengths, 1)]
        assert_close(packed, torch.cat(alone, 1))

    def test_conversion_is_exact(self, twin: Twin, tmp_path: Any) -> None:
        """Saved by us and opened by transformers, weights and config are what they were."""
        twin.ours.save_pretrained(tmp_path)
        back = self.hf_class.from_pretrained(tmp_path)
        assert_equal_trees(back.state_dict(), twin.theirs.state_dict())
        assert _compared(back.config) == _compared(twin.theirs.config)
        again = self.model_class.from_pretrained(tmp_path)
        assert_equal_trees(again.state_dict(), twin.ours.state_dict())
        assert again.config == twin.ours.config

    def test_meta_then_init(self, tiny: Model) -> None:
        """A model built on meta and initialised later is the one built at once; seeds decide."""
        config = tiny.config
        meta = self.model_class.from_config(config, device="meta")
        assert all(p.is_meta for p in meta.parameters())
        assert_equal_trees(init_weights_(meta, 0).state_dict(), tiny.state_dict())
        other = self.model_class.from_config(config, seed=1).state_dict()
        drawn = [n for n, p in tiny.named_parameters() if p.dim() > 1]
        assert not any(torch.equal(other[n], tiny.state_dict()[n]) for n in drawn)

    def test_init_has_the_promised_spread(self, tiny: Model) -> None:
        """Matrices have mean 0 and the family's standard deviation, biases are 0, norms 1."""
        for name, parameter in tiny.named_parameters():
            if parameter.dim() == 1:
                assert torch.all(parameter == (1.0 if name.endswith("norm.weight") else 0.0)), name
                continue
            std, count = tiny.init_std(name), parameter.numel()
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(count), name
            assert abs(parameter.std().item() / std - 1) < 5 / math.sqrt(2 * count), name

    def test_copy_repr_and_pickle(self, tiny: Model) -> None:
        """A deep copy computes the same and shares nothing; the config survives pickling."""
        ids = make_batch(tiny)
        twin = copy.deepcopy(tiny)
        assert torch.equal(twin(ids).logits, tiny(ids).logits)
        mine = {p.data_ptr() for p in tiny.parameters()}
        assert mine.isdisjoint(p.data_ptr() for p in twin.parameters())
        assert len(list(twin.parameters())) == len(list(tiny.parameters()))
        assert pickle.loads(pickle.dumps(tiny.config)) == tiny.config
        assert type(tiny).__name__ in repr(tiny)
        assert type(tiny.config).__name__ in repr(tiny.config)

    def test_dtypes(self, tiny: Model) -> None:
        """Half-precision models keep their ties and stay close to fp32."""
        ids = make_batch(tiny)
        half = self.model_class.from_config(tiny.config, dtype=torch.bfloat16).eval()
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert len(list(half.parameters())) == len(list(tiny.parameters()))
        assert (half(ids).logits.float() - tiny(ids).logits).abs().max() < 0.05

    def test_compiles_whole(self, tiny: Model) -> None:
        """Training and cached decoding are one graph without breaks, with the same numbers."""
        torch.compiler.reset()
        ids = make_batch(tiny)
        compiled = torch.compile(tiny, fullgraph=True, backend="eager")
        loss = compiled(ids, labels=ids).loss
        loss.backward()
        got = {n: p.grad.clone() for n, p in tiny.named_parameters()}
        tiny.zero_grad()
        plain = tiny(ids, labels=ids).loss
        plain.backward()
        assert_close(loss, plain)
        assert_close(got, {n: p.grad for n, p in tiny.named_parameters()})
        cache = KVCache(tiny.config.num_layers, ids.shape[1])
        with torch.no_grad():
            steps = [compiled(ids[:, :8], cache=cache).logits]
            steps += [compiled(ids[:, i : i + 1], cache=cache).logits for i in range(8, 12)]
            assert_close(torch.cat(steps, 1), tiny(ids).logits)
        torch.compiler.reset()


def _gradients(model: Model) -> dict[str, Tensor]:
    return rename_to_theirs(model, {n: p.grad for n, p in model.named_parameters()})


def _their_gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def _compared(config: Any) -> dict[str, Any]:
    dead = {"transformers_version", "_name_or_path", "dtype", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in dead}
