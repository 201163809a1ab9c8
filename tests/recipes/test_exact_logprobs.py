"""`rollout.exact_logprobs`: the loss has the values of the kernels that sample, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.policy import PolicyConfig
from bmforge.align.rollout_config import RolloutConfig
from bmforge.errors import ConfigError
from bmforge.infer import Engine, GenerationConfig, Request
from bmforge.infer.engine.native_step import load_step
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.inputs.prompt_rows import PromptConfig
from bmforge.recipes.registry import find_recipe
from bmforge.surgery import persistent_tensors
from bmforge.testing import run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, read_metrics

pytestmark = pytest.mark.skipif(load_step() is None, reason="needs a C++ compiler")

MARKS = ["<pad>", "</s>", "<unk>", *"0123456789+=abc"]
RATIO, GAP = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    config = LlamaConfig(
        vocab_size=len(MARKS),
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=16,
        init_std=0.2,
    )
    Llama.from_config(config, seed=0).save_pretrained(folder / "model")
    vocabulary = {token: number for number, token in enumerate(MARKS)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(MARKS[:3])
    fast.save(str(folder / "model" / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(roles))
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "low.py").write_text(
        "def low(completions, **columns):\n"
        "    return [sum(c in '01234' for c in text) for text in completions]\n"
    )
    return folder


def run(
    place: Path,
    name: str,
    steps: int = 3,
    precision: Any = "fp32",
    start: str = "model",
    **changes: Any,
) -> Any:
    recipe = find_recipe("rl", str(place / start), None, None)
    rollout = {"num_generations": 4, "max_new_tokens": 6, "temperature": 0.8}
    loop = TrainConfig(
        steps=steps,
        precision=precision,
        disable_dropout=True,
        optim=OptimConfig(lr=1e-2, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
    )
    config = recipe.config(
        run_dir=place / name,
        train=loop,
        data=PromptConfig(
            paths=(str(place / "prompts.jsonl"),),
            seq_len=6,
            global_batch_size=16,
            micro_batch_size=4,
        ),
        rollout=RolloutConfig(**{"exact_logprobs": True, **rollout, **changes.pop("rollout", {})}),
        reward=(f"{place / 'low.py'}:low",),
        **changes,
    )
    return recipe.run(config)


def check_ratios(place: Path, name: str, iterations: int = 1) -> None:
    rows = read_metrics(place / name / "metrics.jsonl")
    for row in rows:
        assert (row[f"{RATIO}/min"], row[f"{RATIO}/max"], row[f"{RATIO}/mean"]) == (1, 1, 1)
        assert (row[f"{GAP}/max"], row[f"{GAP}/mean"]) == (0, 0)
    if iterations == 1:  # otherwise the policy has left the old one
        assert all(row["clip_ratio/region_mean"] == 0 for row in rows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ratio_of_sampler_and_policy_is_one(place: Path, precision: str) -> None:
    run(place, f"one_{precision}", precision=precision)
    check_ratios(place, f"one_{precision}")


def test_without_it_the_ratio_is_not_one_in_16_bits(place: Path) -> None:
    run(place, "plain", precision="bf16", rollout={"exact_logprobs": False})
    assert read_metrics(place / "plain" / "metrics.jsonl")[0][f"{GAP}/max"] > 1e-4


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_tied_head_is_copied_for_rollouts(place: Path, adapter: Any) -> None:
    """In bf16 a copy of the model samples; its head is the copy's own embedding."""
    shutil.copytree(place / "model", place / "tied", dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(place / "model").replace(tie_word_embeddings=True)
    Llama.from_config(config, seed=0).save_pretrained(place / "tied", overwrite=True)
    kind = {} if adapter is None else {"adapter": AdapterConfig(kind=adapter)}
    rollout = {"exact_logprobs": False}
    run(place, f"tied_{adapter}", 1, "bf16", start="tied", rollout=rollout, **kind)
    (row,) = read_metrics(place / f"tied_{adapter}" / "metrics.jsonl")
    assert row[f"{GAP}/mean"] < 0.02  # 0.6 with a head that is not filled


def test_the_gradient_is_that_of_torch(place: Path) -> None:
    """In fp32 the values differ by 1e-6, so one update is nearly the same."""
    results = [
        run(place, f"kind_{exact}", steps=1, rollout={"exact_logprobs": exact})
        for exact in (False, True)
    ]
    found, wanted = (persistent_tensors(result.model) for result in results)
    initial = persistent_tensors(AutoModel.from_pretrained(place / "model"))
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(wanted[key], tensor) for key, tensor in initial.items())


def test_later_updates_have_the_values_of_the_weights_then(place: Path) -> None:
    """Scores of a row equal those of a fresh engine with the weights of now."""
    model: Any = AutoModel.from_pretrained(place / "model")
    options = GenerationConfig(
        max_new_tokens=4,
        do_sample=True,
        temperature=0.8,
        eos_token_id=(1,),
        logprobs=0,
        logprobs_mode="processed_logprobs",
    )
    writer = AnswerWriter(model, 4, 12, options)
    try:
        answers = writer.write([[3, 4, 5]], [7], 2)[0]
        rows = [[3, 4, 5, *answer.ids] for answer in answers]
        for answer, scored in zip(answers, writer.score(rows), strict=True):
            assert scored[2:] == [token.logprob for token in answer.logprobs or ()]
        with torch.no_grad():
            model.layers["0"].attn.k_proj.weight.data.mul_(1.5)  # raises no version
        later = writer.score(rows)
        again = writer.write([[3, 4, 5]], [7], 2)[0]
    finally:
        writer.close()
    with Engine(model) as engine:
        for row, scored in zip(rows, later, strict=True):
            once = options.replace(max_new_tokens=1, seed=0, prompt_logprobs=0)
            fresh = engine.submit(Request(row, once)).wait()[0].prompt_logprobs
            assert scored == [token.logprob for token in fresh[1:]]
    for answer in again:
        assert all(token.logprob <= 0 for token in answer.logprobs or ())


def test_old_values_of_several_updates_are_the_samplers(place: Path) -> None:
    run(place, "twice", steps=4, rollout={"num_iterations": 2})
    check_ratios(place, "twice", 2)
    clipped = [r["clip_ratio/region_mean"] for r in read_metrics(place / "twice" / "metrics.jsonl")]
    assert clipped[0] == clipped[2] == 0


def _run_laid_out(place: Path, name: str, layout: Layout, precision: str) -> None:
    run(place, name, steps=2, precision=precision, layout=layout)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(zero=3), "bf16"),
        (Layout(tp=2), "fp32"),
        pytest.param(Layout(zero=3), "fp32", marks=pytest.mark.long),
        pytest.param(Layout(tp=2), "bf16", marks=pytest.mark.long),
        pytest.param(Layout(pp=2), "fp32", marks=pytest.mark.long),
        pytest.param(Layout(cp=2), "bf16", marks=pytest.mark.long),
    ],
)
def test_layouts(place: Path, layout: Layout, precision: str) -> None:
    name = f"{layout}_{precision}".replace("/", "")
    run_distributed(_run_laid_out, 2, place, name, layout, precision)
    check_ratios(place, name)


def test_rows_without_one_more_position_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="one position more"):
        run(place, "refused", rollout={"max_new_tokens": 10})


def test_blocks_that_do_not_run_natively_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.kind='lora'"):
        run(place, "refused", adapter=AdapterConfig(kind="lora", rank=2))
    assert not (place / "refused").exists()
    hooked: Any = AutoModel.from_pretrained(place / "model")
    hooked.layers["0"].register_forward_hook(lambda *_: None)
    for model, wanted in ((AutoModel.from_pretrained(place / "model"), True), (hooked, False)):
        writer = AnswerWriter(model.train(), 4, 12, GenerationConfig(max_new_tokens=4))
        assert writer.runs_natively == wanted
        writer.close()


def test_the_kl_in_the_reward_uses_the_samplers_values(place: Path) -> None:
    run(place, "kl", steps=2, method="rloo", rl=PolicyConfig(beta=0.1))
    check_ratios(place, "kl")
