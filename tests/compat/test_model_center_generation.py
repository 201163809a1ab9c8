"""Text under the old names: a beam search and sampling written out, and printing of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center import generation
from bmforge.compat.model_center.model import T5, Llama, LlamaConfig, T5Config
from bmforge.compat.model_center.utils import print_inspect
from bmforge.errors import ConfigError
from bmforge.parallel import shutdown_distributed

END, BLANK, NEXT = 1, 38, 37


class Digits:
    """A tokenizer whose text is ids with spaces between."""

    eos_token_id = END
    ends = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()] + [END] * self.ends

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        return {"<extra_id_0>": BLANK, "<extra_id_1>": NEXT}[token]


class EndedDigits(Digits):
    ends = True


def llama() -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64}
    model = Llama(LlamaConfig(**sizes, num_layers=2))
    sharpen(model)
    return model


def sharpen(model: Any) -> None:
    """Make scores differ clearly."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 if p.dim() == 1 else 8.0)


def theirs(model: Any, folder: Any, kind: Any) -> Any:
    model.save_pretrained(folder)
    return kind.from_pretrained(folder).eval()


def test_beams_are_those_of_transformers(tmp_path: Any) -> None:
    """Without penalty the old search is the usual one; prompts of different lengths."""
    model = llama()
    texts = ["5 6 7", "8 9 10 11 12"]
    found = generation.LlamaBeamSearch(model, Digits()).generate(texts, beam_size=3, max_length=6)
    twin = theirs(model, tmp_path, hf.LlamaForCausalLM)
    for text, answer in zip(texts, found, strict=True):
        ids = torch.tensor([Digits().encode(text)])
        wanted = twin.generate(
            ids, num_beams=3, max_new_tokens=7, min_new_tokens=1, eos_token_id=END, pad_token_id=0,
            do_sample=False,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        wanted = wanted[: wanted.index(END)] if END in wanted else wanted[:6]
        assert answer == Digits().decode(wanted)


def test_sampling_draws_what_it_may() -> None:
    """With one token to draw from it is the likeliest; a penalty counts only what was written."""
    model = llama()
    sampler = generation.LlamaRandomSampling(model, Digits())
    (greedy,) = sampler.generate(["5 6 7"], top_k=1, top_p=1.0, temperature=1.0, max_length=5)
    ids, mask = [5, 6, 7], []
    for step in range(5):
        logits = model(torch.tensor([ids]), return_logits=True)[0, -1]
        if step == 0:
            logits[END] = -torch.inf
        token = int(logits.argmax())
        if token == END:
            break
        ids.append(token)
        mask.append(token)
    assert greedy == Digits().decode(mask)
    torch.manual_seed(0)
    drawn = {sampler.generate(["5 6 7"], max_length=4)[0] for _ in range(5)}
    assert len(drawn) > 1
    with pytest.raises(ConfigError, match="repetition_window"):
        sampler.generate(["5"], repetition_window=3)


def test_t5_fills_the_blank_up_to_the_next() -> None:
    """Greedily, one token after the other; a text without a blank gets one at its end."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64}
    model = T5(T5Config(**sizes, num_encoder_layers=1, num_decoder_layers=1)).eval()
    texts = ["5 6 7", f"8 {BLANK} 9"]
    found = generation.T5BeamSearch(model, EndedDigits()).generate(texts, beam_size=1, max_length=5)
    for text, answer in zip(texts, found, strict=True):
        ids = Digits().encode(text)
        source = torch.tensor([[*ids, *([] if BLANK in ids else [BLANK]), END]])
        target = [0, BLANK]
        for step in range(5):
            made = model(
                input_ids=source, decoder_input_ids=torch.tensor([target]), return_logits=True
            )
            logits = made[0, -1]
            if step == 0:
                logits[[END, NEXT]] = -torch.inf
            if int(logits.argmax()) in (END, NEXT):
                break
            target.append(int(logits.argmax()))
        assert answer == Digits().decode(target[2:])


def test_parameters_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        bmt.init_distributed()
        model = llama()
        print_inspect(model, "*norm*")
    finally:
        shutdown_distributed()
    assert "norm" in capsys.readouterr().out
