"""Runs of `bmforge train preferences` and `bmforge train reward`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import settings, wait_for_all
from test_sft import CHATML, write_letters

from bmforge.align.kept_reference import keep_reference_
from bmforge.errors import ConfigError, DataError
from bmforge.models import AutoModel, Llama, init_weights_
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.inputs.conversation_rows import EncodedRow
from bmforge.recipes.inputs.preference_rows import EncodedPair, PreferencePairs
from bmforge.recipes.preferences import PairData, PreferencesConfig, train_preferences
from bmforge.recipes.reward import RewardConfig, train_reward
from bmforge.testing import assert_equal_trees, run_distributed
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import read_metrics

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_seq_len": 64,
}


@dataclasses.dataclass(kw_only=True)
class SmallPreferences(PreferencesConfig):
    """Preferences of a small Llama."""

    model: LlamaConfig = dataclasses.field(default_factory=lambda: LlamaConfig(**SIZES))


@dataclasses.dataclass(kw_only=True)
class SmallReward(RewardConfig):
    """A small Llama as reward model."""

    model: LlamaConfig = dataclasses.field(default_factory=lambda: LlamaConfig(**SIZES))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A directory with a base model, its tokenizer, pairs and marked answers."""
    letters = write_letters(tmp_path / "letters", chat_template=CHATML)
    model = Llama.from_config(LlamaConfig(**SIZES, attn_dropout=0.3))
    init_weights_(model, seed=0)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(letters).save_pretrained(tmp_path / "base")
    pairs, marked = [], []
    for number in range(14):
        word = "abcdefgh"[number % 7 :][: 2 + number % 4]
        good, bad = f"yes {word}", f"no{word}"
        pairs.append(
            {
                "prompt": [{"role": "user", "content": word}],
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
                "margin": 0.5,
            }
        )
        marked.append({"prompt": word, "completion": good if number % 2 else bad})
        marked[-1]["label"] = bool(number % 2)
    for name, rows in (("pairs", pairs), ("marked", marked)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def make_config(start: Path, name: str, steps: int, **changes: Any) -> Any:
    """A run on the pairs, or with kto on the marked answers; half of a batch is padding."""
    kind = SmallReward if changes.pop("is_reward", False) else SmallPreferences
    file = str(start / ("marked" if changes.get("method") == "kto" else "pairs")) + ".jsonl"
    ignore = ("id",) if kind is SmallReward else ("id", "margin")
    sizes: Any = {"seq_len": 64, "global_batch_size": 6, "micro_batch_size": 2}
    data = PairData(paths=(file,), validation=(file,), ignore=ignore, **sizes)
    train = settings(steps, lr=3e-3, disable_dropout=True)
    base = {"run_dir": start / name, "init_from": str(start / "base"), "data": data}
    return kind(**base, train=train, **changes)


def run(config: Any) -> list[dict[str, Any]]:
    train = train_reward if isinstance(config, RewardConfig) else train_preferences
    train(config)
    wait_for_all()
    return read_metrics(config.run_dir / "metrics.jsonl")


@pytest.mark.parametrize("method", ["dpo", "kto", "simpo"])
def test_preferences_are_learned(method: str, start: Path) -> None:
    """The margin of rewards grows; the export opens with tokenizer and template."""
    rows = run(make_config(start, "run", 12, method=method))
    assert rows[-1]["rewards/margins"] > max(rows[0]["rewards/margins"], 0)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["val_rewards/margins"] > 0
    export = start / "run" / "export"
    assert AutoModel.from_pretrained(export).config.attn_dropout == 0.3
    assert (export / "chat_template.jinja").read_text() == CHATML


def test_margins_are_for_reward_models_alone(start: Path) -> None:
    """They are refused by name in DPO, and a reward model may ignore them."""
    config = make_config(start, "dpo", 2)
    config.data.ignore = ("id",)
    with pytest.raises(DataError, match=r"line 1 has the fields margin, .* --data.ignore margin"):
        run(config)
    assert not config.run_dir.exists()
    losses = []
    for ignore in (("id",), ("id", "margin")):
        config = make_config(start, f"reward-{len(ignore)}", 1, is_reward=True)
        config.data.ignore = ignore
        losses.append(run(config)[0]["loss"])
    assert losses[0] > losses[1] == pytest.approx(0.6931, abs=0.1)


def test_references_agree(start: Path) -> None:
    """Adapter off, a frozen copy and kept log-probabilities give the same run."""
    adapter = AdapterConfig(kind="lora", rank=2)
    rows = {}
    for kind in ("adapter", "copy", "precomputed"):
        config = make_config(start, kind, 3, adapter=adapter, reference=kind)
        rows[kind] = run(config)
    first = rows["adapter"][0]
    assert first["loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert first["rewards/margins"] == 0.0
    assert first["grad_norm"] > 0
    for kind in ("copy", "precomputed"):
        for got, want in zip(rows[kind], rows["adapter"], strict=True):
            for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "dpo", "adapter": AdapterConfig(kind="lora", rank=2)},
        {"method": "ipo", "reference": "precomputed"},
        {"is_reward": True},
    ],
)
def test_resumes_bit_for_bit(start: Path, changes: dict[str, Any]) -> None:
    """Three steps and three more have the losses and weights of six."""
    whole = run(make_config(start, "whole", 6, **changes))
    config = make_config(start, "parts", 3, **changes)
    run(config)
    run(dataclasses.replace(config, train=settings(6, lr=3e-3, disable_dropout=True)))
    parts = read_metrics(start / "parts" / "metrics.jsonl")
    names = ("loss", "grad_norm")
    assert [[row[n] for n in names] for row in parts] == [[row[n] for n in names] for row in whole]
    files = [sorted((start / n / "export").glob("*.safetensors")) for n in ("whole", "parts")]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    for ours, theirs in zip(*files, strict=True):
        assert_equal_trees(load_file(ours), load_file(theirs))


def run_on_layout(config: Any) -> list[list[float]]:
    """Losses, gradient norms and margins of a run."""
    rows = run(config)
    margin = "margin" if isinstance(config, RewardConfig) else "rewards/margins"
    return [[row["loss"], row["grad_norm"], row[margin]] for row in rows]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, Layout(zero=3), id="zero3"),
        pytest.param(2, Layout(pp=2), id="pp"),
        pytest.param(2, Layout(tp=2), id="tp", marks=pytest.mark.long),
        pytest.param(2, Layout(cp=2), id="cp", marks=pytest.mark.long),
    ],
)
def test_layouts(start: Path, world: int, layout: Layout) -> None:
    """DPO with a copy as reference, KTO and a reward model, on layouts and on one process."""
    cases: dict[str, dict[str, Any]] = {
        "dpo": {"method": "dpo"},
        "kto": {"method": "kto", "adapter": AdapterConfig(kind="lora", rank=2)},
        "reward": {"is_reward": True},
    }
    for name, changes in cases.items():
        want = run_distributed(run_on_layout, 1, make_config(start, f"{name}1", 3, **changes))[0]
        config = make_config(start, f"{name}2", 3, layout=layout, **changes)
        for got in run_distributed(run_on_layout, world, config):
            assert torch.tensor(got).allclose(torch.tensor(want), rtol=2e-4, atol=2e-5), name


def test_reward_models_are_classifiers(start: Path) -> None:
    """Chosen answers get the larger reward; transformers opens the export with equal rewards."""
    transformers = pytest.importorskip("transformers")
    rows = run(make_config(start, "run", 30, is_reward=True))
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["min_reward"] < rows[-1]["mean_reward"] < rows[-1]["max_reward"]
    export = start / "run" / "export"
    ours = AutoModel.from_pretrained(export)
    assert (ours.config.head, ours.config.num_labels) == ("sequence_classification", 1)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = [tokenizer.encode(text) for text in ("abc yes", "ab no", "abcd")]
    width = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.pad_id] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    with torch.no_grad():
        together = ours(input_ids=padded, attention_mask=mask).logits[:, 0]
        alone = [ours(input_ids=torch.tensor([row])).logits[0, 0] for row in ids]
        other = theirs(input_ids=padded, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": "dp"}, "unknown method: method='dp'"),
        ({"label_smoothing": 0.1, "method": "ipo"}, "label_smoothing has no effect"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5"),
        ({"method": "simpo", "simpo_gamma": float("nan")}, "simpo_gamma=nan must be finite"),
        ({"beta": float("inf")}, "beta=inf must be above 0, and finite"),
        ({"simpo_gamma": 0.5}, "simpo_gamma has no effect"),
        ({"desirable_weight": 1.0}, "desirable_weight has no effect"),
        ({"nll_on_prompt": True}, "nll_on_prompt has no effect"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"method": "orpo", "reference": "copy"}, "reference has no effect"),
        ({"reference": "adapter"}, "needs an adapter"),
    ],
)
def test_options_without_effect_are_refused(
    start: Path, changes: dict[str, Any], what: str
) -> None:
    """Before anything is read or written."""
    with pytest.raises(ConfigError, match=what):
        run(make_config(start, "run", 1, **changes))
    assert not (start / "run").exists()


def test_kept_values_follow_the_rows(start: Path) -> None:
    """Values are read again for the same rows, and computed for other ones."""
    model: Any = AutoModel.from_pretrained(start / "base")
    row = EncodedRow([5, 6, 7, 8], [-100, -100, 7, 8])
    sources = [
        PreferencePairs([EncodedPair(row, EncodedRow([5, 6, end], [-100, -100, end]))], 8)
        for end in (9, 9, 10)
    ]
    for source in sources:
        keep_reference_([source], start, 2, model)
    first, again, other = (source.reference for source in sources)
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert other[0, 0] == first[0, 0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)
    assert other[0, 1].item() == pytest.approx(logits[10].item(), rel=1e-5)
    assert first[0, 1].item() == pytest.approx(logits[9].item(), rel=1e-5)
