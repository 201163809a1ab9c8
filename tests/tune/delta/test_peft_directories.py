"""Every directory that PEFT writes gives PEFT's logits, or is refused with the field's name.

And every directory of ours that says it is PEFT's gives our logits in PEFT.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
import peft
from peft_cases import CASES, inputs_of, make_base, make_theirs, open_base

from bmforge.errors import BmforgeError, ConfigError
from bmforge.models import AutoModel
from bmforge.tune.delta import load_delta
from bmforge.tune.delta.peft_fields import FIELDS, check_fields

CONFIGS = {
    "LORA": peft.LoraConfig,
    "IA3": peft.IA3Config,
    "LN_TUNING": peft.LNTuningConfig,
    "PREFIX_TUNING": peft.PrefixTuningConfig,
    "PROMPT_TUNING": peft.PromptTuningConfig,
    "P_TUNING": peft.PromptEncoderConfig,
}


def text_logits(out: Any, length: int) -> torch.Tensor:
    """Return the logits without those of a prompt's rows, which PEFT gives or not."""
    logits = out.logits
    return logits[:, -length:] if logits.dim() == 3 else logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def check_case(name: str, folder: Path, target: Path) -> float:
    """Compare one case in both directions; return the largest difference."""
    case = CASES[name]
    base = make_base(case.base, folder)
    make_theirs(case, base, target / "theirs")
    model: Any = AutoModel.from_pretrained(base).eval()
    if case.refused:
        with pytest.raises(BmforgeError, match=case.refused):
            load_delta(model, target / "theirs")
        return 0.0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(open_base(case.base, base), target / "theirs")
        inputs = inputs_of(case.base)
        length = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
        want = text_logits(theirs.eval()(**inputs), length)
        plain = text_logits(open_base(case.base, base)(**inputs), length)
        assert (want - plain).abs().max() > 1e-3, "the adapter does nothing"
        delta = load_delta(model, target / "theirs")
        off = (text_logits(model(**inputs), length) - want).abs().max().item()
        limit = max(2e-5, 5e-7 * want.abs().max().item())  # logits of 250 have an ulp of 1.5e-5
        assert off <= limit, f"theirs here: {off}"
        delta.save(target / "ours")
        if "bmforge" in json.loads((target / "ours" / "adapter_config.json").read_text()):
            again = AutoModel.from_pretrained(base).eval()  # it does not say that it is PEFT's
            load_delta(again, target / "ours")
            assert torch.equal(again(**inputs).logits, model(**inputs).logits)
            return off
        again = peft.PeftModel.from_pretrained(open_base(case.base, base), target / "ours")
        back = (text_logits(again.eval()(**inputs), length) - want).abs().max().item()
        assert back <= limit, f"ours there: {back}"
    return max(off, back)


BIASES = "gpt2 Lora r=4 lora_alpha=8 init_lora_weights=False bias=all"
FEW = sorted({*random.Random(0).sample(sorted(CASES), 12), BIASES})


@pytest.mark.parametrize("name", FEW)
def test_logits_are_those_of_peft(name: str, folder: Path, tmp_path: Path) -> None:
    check_case(name, folder, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CASES) - set(FEW)))
def test_all_logits_are_those_of_peft(name: str, folder: Path, tmp_path: Path) -> None:
    check_case(name, folder, tmp_path)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_field_is_in_the_table(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(CONFIGS[kind])}
    assert fields <= set(FIELDS[kind])


def test_unknown_fields_are_refused_by_name() -> None:
    check_fields({"peft_type": "LORA", "new_field": None})
    with pytest.raises(ConfigError, match="new_field=3"):
        check_fields({"peft_type": "LORA", "new_field": 3})


def test_older_weights_are_read_without_running_code(folder: Path, tmp_path: Path) -> None:
    """adapter_model.bin holds the same tensors; a pickle that runs code is refused."""
    from safetensors.torch import load_file

    case = next(case for case in CASES.values() if case.base == "llama")
    base = make_base("llama", folder)
    make_theirs(case, base, tmp_path / "one")
    file = tmp_path / "one" / "adapter_model.safetensors"
    model, other = (AutoModel.from_pretrained(base).eval() for _ in range(2))
    load_delta(model, tmp_path / "one")
    torch.save(load_file(file), file.with_name("adapter_model.bin"))
    file.unlink()
    load_delta(other, tmp_path / "one")
    ids = inputs_of("llama")["input_ids"]
    assert torch.equal(model(ids).logits, other(ids).logits)
    torch.save({"x": Path("a")}, file.with_name("adapter_model.bin"))
    with pytest.raises(BmforgeError, match="damaged"):
        load_delta(AutoModel.from_pretrained(base), tmp_path / "one")
