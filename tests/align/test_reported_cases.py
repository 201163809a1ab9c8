"""Failures that users of other libraries reported, as tests of what happens here.

docs/results/post_training.md lists all of them with the test that holds each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollouts import END, make_model

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.losses import MethodOptions
from bmforge.align.policy import Policy, count_items
from bmforge.align.preferences import PairObjective
from bmforge.align.scoring import score_tokens
from bmforge.cli import main
from bmforge.infer import GenerationConfig
from bmforge.models import Mixtral, MixtralConfig
from bmforge.recipes.rollout_run import _PLAIN_SAMPLING
from bmforge.tune.delta import Lora, init_deltas_

SAMPLING: dict[str, Any] = {
    **{"max_new_tokens": 6, "do_sample": True, "eos_token_id": (END,)},
    **{"logprobs": 0, "logprobs_mode": "processed_logprobs"},
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_on_the_left_changes_no_score(kind: str) -> None:
    """With the positions that the mask determines, learned ones too."""
    model = make_model(kind).eval()
    ids = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    pad = torch.nn.functional.pad
    for extra in (1, 4):
        mask = pad(torch.ones_like(ids), (extra, 0))
        inputs = {"input_ids": pad(ids, (extra, 0)), "attention_mask": mask}
        if kind == "gpt2":
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            short = score_tokens(model, {"input_ids": ids}, ids)
            long = score_tokens(model, inputs, pad(ids, (extra, 0), value=-100))
        assert short is not None
        assert long is not None
        found = long.logprobs[:, extra + 1 :]
        torch.testing.assert_close(found, short.logprobs[:, 1:], rtol=0, atol=2e-6)


def test_results_of_tools_leave_the_loss_and_its_denominator() -> None:
    """Tokens without a label inside an answer: IPO's lengths and the policy's counts skip them."""
    model = make_model().double().eval()
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, 5:7] = -100  # the result of a tool
    objective = PairObjective("ipo", MethodOptions(beta=0.1))
    batch = {"input_ids": ids, "labels": labels, "reference_logps": torch.zeros(2)}
    found = objective(model, batch, 1)
    assert found is not None
    with torch.no_grad():
        logs = model(input_ids=ids).logits.log_softmax(-1)[:, :-1]
    picked = logs.gather(2, ids[:, 1:, None])[..., 0]
    chosen = picked[0, [2, 3, 6, 7]].sum() / 4
    rejected = picked[1, 2:].sum() / 6
    wanted = (chosen - rejected - 1 / 0.2) ** 2
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    assert int(found.metrics["num_tokens"]) == 10
    mask = (labels != -100).long()
    assert count_items(mask, Policy(normalize="token")) == 10
    assert count_items(mask * torch.tensor([[0], [1]]), Policy()) == 1


def test_experts_of_sampler_and_policy_are_the_same() -> None:
    """Routers of a mixture of experts choose alike, so the log-probabilities agree."""
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        num_experts=4,
        experts_per_token=2,
        max_seq_len=64,
        init_std=0.3,
    )
    model = Mixtral.from_config(config, seed=1).eval()
    writer = AnswerWriter(model, 8, 24, GenerationConfig(**SAMPLING))
    try:
        answers = writer.write([[3, 4, 5], [6, 7]], [1, 2], 4)
    finally:
        writer.close()
    for prompt, group in zip(([3, 4, 5], [6, 7]), answers, strict=True):
        for answer in group:
            ids = torch.tensor([[*prompt, *answer.ids]])
            with torch.no_grad():
                scores = score_tokens(model, {"input_ids": ids}, ids)
            assert scores is not None
            found = torch.tensor([token.logprob for token in answer.logprobs or ()])
            torch.testing.assert_close(
                found.float(), scores.logprobs[0, len(prompt) :], rtol=0, atol=2e-5
            )


def test_filters_of_sampling_are_not_taken_from_the_model() -> None:
    """Filters in generation_config.json would make the sampler another policy than the trained."""
    model = make_model().eval()
    filters = {"top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5}
    options = GenerationConfig(**{**SAMPLING, **filters, **_PLAIN_SAMPLING})
    writer = AnswerWriter(model, 8, 24, options)
    try:
        answers = writer.write([[3, 4, 5]], [1], 8)[0]
    finally:
        writer.close()
    for answer in answers:
        ids = torch.tensor([[3, 4, 5, *answer.ids]])
        with torch.no_grad():
            scores = score_tokens(model, {"input_ids": ids}, ids)
        assert scores is not None
        found = torch.tensor([token.logprob for token in answer.logprobs or ()])
        torch.testing.assert_close(found.float(), scores.logprobs[0, 3:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("option", ["top-p 0.8", "top-k 5", "min-p 0.1", "repetition-penalty 1.2"])
def test_filters_of_sampling_are_no_options(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}))
    command = f"train rl --model {tmp_path / 'model'} --data.paths {tmp_path / 'prompts.jsonl'}"
    assert main([*command.split(), *f"--rollout.{option}".split()]) == 2
    assert option.split()[0] in capsys.readouterr().err


def test_an_adapter_is_never_merged_for_rollouts() -> None:
    """The base keeps its bits over rollouts and updates, and the adapter writes the answers."""
    model = make_model()
    delta = Lora(model, targets=["attn.q_proj", "attn.v_proj"], rank=2)
    init_deltas_(delta, 3)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    writer = AnswerWriter(model, 8, 24, GenerationConfig(**SAMPLING))
    try:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.2)
            answer = writer.write([[3, 4, 5]], [1], 1)[0][0]
    finally:
        writer.close()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    ids = torch.tensor([[3, 4, 5, *answer.ids]])
    with torch.no_grad():
        scores = score_tokens(model.eval(), {"input_ids": ids}, ids)
    assert scores is not None
    found = torch.tensor([token.logprob for token in answer.logprobs or ()]).float()
    torch.testing.assert_close(found, scores.logprobs[0, 3:], rtol=0, atol=2e-5)
