"""Compares a family with its transformers implementation; a new family needs one small class.

    class TestGPT2(DecoderSuite, FileSuite):
        model_class = GPT2
        hf_class = transformers.GPT2LMHeadModel
        cases = {"default": {"n_embd": 32, ...}, "untied": {...}}

A case consists of the fields of a tiny transformers config. `FamilySuite` has the tests that need
no reference; `DecoderSuite`, `EncoderSuite` and `Seq2SeqSuite` have the tests of one kind of model;
and `FileSuite` has the tests of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.models import Model, ModelConfig
from bmforge.testing.batches import make_labels
from bmforge.testing.capability import capability
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.reference_pair import Twin, make_twin, to_reference_names
from bmforge.testing.tolerance import assert_close, assert_equal_trees

__all__ = ["ModelSuite"]

_COMPARED = (
    "loss",
    "logits",
    "last_hidden_state",
    "pooler_output",
    "start_logits",
    "end_logits",
    "encoder_last_hidden_state",
)


class ModelSuite(FamilySuite):
    """Tests that compare a family with transformers, for each config in `cases` and each head.

    Attributes:
        hf_class: transformers' class for the family's first head.
        cases: dict from name to fields of a tiny config.
        hf_heads: dict from each further head of the family to transformers' class.
    """

    hf_class: ClassVar[Any]
    cases: ClassVar[dict[str, Mapping[str, Any]]]
    hf_heads: ClassVar[dict[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test by the names in `cases`, or by head, if it has the argument."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(self.cases), scope="class")
        if "head" in metafunc.fixturenames:
            metafunc.parametrize("head", list(self.hf_heads))

    @pytest.fixture(scope="class")
    @classmethod
    def twin(cls, case: str, tmp_path_factory: pytest.TempPathFactory) -> Twin:
        """Fixture: the transformers model and the bmforge model of a config in `cases`."""
        directory = tmp_path_factory.mktemp(case)
        return make_twin(cls.model_class, cls.hf_class, cls.cases[case], directory)

    def tiny_config(self) -> ModelConfig:
        """Return the first config in `cases`."""
        first = next(iter(self.cases.values()))
        raw = self.hf_class.config_class(**first).to_dict()
        return self.model_class.config_class.from_hf(raw)

    @capability("logits")
    def test_outputs_and_hidden_states(self, twin: Twin) -> None:
        """All hidden states and outputs equal those of transformers."""
        self.check_outputs(twin)

    @capability("gradients")
    def test_loss_and_gradients(self, twin: Twin) -> None:
        """The loss and all gradients equal those of transformers."""
        self.check_gradients(twin)

    @capability("conversion")
    def test_conversion_is_exact(self, twin: Twin, tmp_path: Path) -> None:
        """A model that bmforge saves and transformers loads has the same weights and config."""
        self.check_conversion(twin, self.hf_class, tmp_path)

    def test_every_head(self, head: str, tmp_path: Path) -> None:
        """Outputs, gradients and conversion are correct for the other heads."""
        hf_class = self.hf_heads[head]
        fields = dict(next(iter(self.cases.values())))
        if head.endswith("classification"):
            fields["num_labels"] = 3
        if "vocab_size" in fields:  # no row of `make_batch` has this id
            fields["pad_token_id"] = fields["vocab_size"] - 1
        twin = make_twin(self.model_class, hf_class, fields, tmp_path / "theirs")
        assert twin.model.config.head == head
        # Checked first, because transformers' forward modifies its config.
        self.check_conversion(twin, hf_class, tmp_path / "ours")
        self.check_outputs(twin)
        if head != "none":
            self.check_gradients(twin)

    def test_missing_head_needs_new_head(self, head: str, tmp_path: Path) -> None:
        """A head that is not in the checkpoint needs `new_head`; other weights are unchanged."""
        base = self.model_class.from_config(self.tiny_config())
        base.save_pretrained(tmp_path / "base")
        names = set(base.config.heads[head].names)
        if names:
            with pytest.raises(CheckpointError, match="new_head=True"):
                self.model_class.from_pretrained(tmp_path / "base", head=head)
        model = self.model_class.from_pretrained(
            tmp_path / "base", head=head, new_head=True, num_labels=5
        )
        shared = set(base.state_dict()) & set(model.state_dict())
        assert shared >= {n for n in base.state_dict() if n.startswith(("layers.", "encoder."))}
        for name in shared:
            assert torch.equal(base.state_dict()[name], model.state_dict()[name]), name
        model.save_pretrained(tmp_path / "new")
        again = self.model_class.from_pretrained(tmp_path / "new")
        assert again.config.head == head
        assert_equal_trees(again.state_dict(), model.state_dict())

    def check_outputs(self, twin: Twin) -> None:
        """Compare all outputs of the two models."""
        inputs = self.make_inputs(twin.model)
        expected = self.run_reference(twin.reference, inputs, output_hidden_states=True)
        outputs = twin.model(**inputs, output_hidden_states=True)
        compared = _compare(outputs, expected)
        assert compared, "the outputs of the two models have no field in common"
        states = expected.get("hidden_states") or expected.get("decoder_hidden_states")
        assert len(outputs.hidden_states) == len(states)
        for state, other in zip(outputs.hidden_states, states, strict=True):
            assert_close(state, other, atol=_noise(other))
        assert torch.equal(outputs.last_hidden_state, outputs.hidden_states[-1])

    def check_gradients(self, twin: Twin) -> None:
        """Compare the loss and all gradients of the two models."""
        inputs = self.make_inputs(twin.model)
        inputs |= make_labels(twin.model, inputs)
        twin.reference.zero_grad()
        twin.model.zero_grad()
        expected = self.run_reference(twin.reference, inputs)
        outputs = twin.model(**inputs)
        expected.loss.backward()
        outputs.loss.backward()
        _compare(outputs, expected)
        assert_close(self.model_gradients(twin.model), self.reference_gradients(twin.reference))

    def check_conversion(self, twin: Twin, hf_class: Any, directory: Path) -> None:
        """Compare weights and configs after conversion to transformers and back."""
        twin.model.save_pretrained(directory)
        back = hf_class.from_pretrained(directory)
        assert_equal_trees(back.state_dict(), twin.reference.state_dict())
        assert _fields(back.config) == _fields(twin.reference.config)
        again = self.model_class.from_pretrained(directory)
        assert_equal_trees(again.state_dict(), twin.model.state_dict())
        assert again.config == twin.model.config

    def run_reference(self, model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
        """Run transformers' model; families with other argument names override this."""
        return model(**inputs, **options)

    def model_gradients(self, model: Model) -> dict[str, Tensor]:
        """Return a dict from transformers' name to bmforge's gradient; zeros if there is none."""
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        return to_reference_names(model, gradients)

    def reference_gradients(self, model: Any) -> dict[str, Tensor]:
        """Return a dict from name to transformers' gradient; zeros if there is none."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }


def _compare(outputs: Any, expected: Any) -> list[str]:
    """Compare the outputs that both models return; return the names of these outputs."""
    names = []
    for name in _COMPARED:
        value, other = getattr(outputs, name, None), expected.get(name)
        if value is not None and other is not None:
            assert_close({name: value}, {name: other}, atol=_noise(other))
            names.append(name)
    return names


def _noise(reference: Tensor) -> float:
    """Return the expected fp32 rounding error: 1e-6 of the largest element."""
    return 1e-6 * max(1.0, reference.abs().max().item())


def _fields(config: Any) -> dict[str, Any]:
    dead = {"transformers_version", "_name_or_path", "dtype", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in dead}
