"""Loss and gradients of every method against TRL's own trainers, on one batch.

TRL pads prompts on the left, stacks all chosen before all rejected answers, and loads the model by
transformers: nothing is shared but the weights' file and the numbers of the batch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from bmforge.align.distillation import DistillationObjective
from bmforge.align.losses import METHODS, MethodOptions
from bmforge.align.policy import METHODS as POLICIES
from bmforge.align.policy import Policy
from bmforge.align.preferences import PairObjective, UnpairedObjective
from bmforge.align.reference import frozen_copy
from bmforge.align.reinforcement import PolicyObjective
from bmforge.align.reward import RewardObjective
from bmforge.align.rewards import open_rewards
from bmforge.align.rollout_batches import RolloutAnswer, collate_answers
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.train.objective import count_items, prepare_batches

# Earlier versions have other losses and other names in a batch.
trl = pytest.importorskip(
    "trl", minversion="1.16", reason="compares with TRL 1.16 (pip install trl==1.16.0)"
)
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long

VOCAB, WIDTH, MAX_TOKENS = 40, 14, 8
# The chosen answers have one length: TRL averages the negative log-likelihood over the tokens of
# its micro-batch, bmforge over the pairs, which is the same number then.
LENGTHS = [(3, 5, 2), (4, 4, 5), (2, 6, 4), (3, 5, 7)]
EQUAL = [(3, 5, 2), (3, 5, 6), (3, 5, 4), (3, 5, 7)]


@pytest.fixture
def compare(record_property: Any, folder: Path) -> Callable[..., None]:
    """Compares losses, and gradients under the names of the published checkpoint."""

    def check(ours: Any, theirs: Any, losses: tuple[Tensor, Tensor]) -> None:
        gaps = measure_gaps(ours, theirs, losses, folder)
        for name, gap in gaps.items():
            record_property(name, f"{gap:.1e}")
        assert max(gaps.values()) <= 1e-5

    return check


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of a policy, a reference and a reward model, with a tokenizer."""
    place = tmp_path_factory.mktemp("trl")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 24, "max_seq_len": 64, "init_std": 0.3}
    heads = {"head": "sequence_classification", "num_labels": 1}
    for name, seed, more in (("policy", 1, {}), ("reference", 2, {}), ("reward", 3, heads)):
        Llama.from_config(LlamaConfig(**sizes, **more), seed=seed).save_pretrained(place / name)
        file = place / name / "config.json"
        ends = {"eos_token_id": 2, "pad_token_id": 0}
        file.write_text(json.dumps(json.loads(file.read_text()) | ends))
        vocabulary = {f"w{n}": n for n in range(3, VOCAB)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
        written = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
        written.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        written.save(str(place / name / "tokenizer.json"))
        roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<s>"}
        roles["tokenizer_class"] = "PreTrainedTokenizerFast"
        (place / name / "tokenizer_config.json").write_text(json.dumps(roles))
    return place


def open_theirs(folder: Path, name: str) -> Any:
    kind = "AutoModelForSequenceClassification" if name == "reward" else "AutoModelForCausalLM"
    opened = getattr(transformers, kind).from_pretrained(folder / name, dtype=torch.float32)
    return opened.eval()


def measure_gaps(
    ours: Any, theirs: Any, losses: tuple[Tensor, Tensor], folder: Path
) -> dict[str, float]:
    """Return the relative differences of the losses and of the gradient tensors, the largest."""
    losses[1].backward()
    wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for parameter in ours.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    ours.save_pretrained(folder / "gradients", overwrite=True)
    found = load_file(folder / "gradients" / "model.safetensors")
    whole = float(torch.cat([grad.flatten() for grad in wanted.values()]).norm())
    assert whole > 1e-4
    # A tensor with a hundredth of the whole gradient or less has the rounding of the whole.
    gaps = [
        float((found[name] - grad).norm()) / max(float(grad.norm()), 0.01 * whole)
        for name, grad in wanted.items()
    ]
    values = [float(loss.detach()) for loss in losses]
    return {"loss": abs(values[0] - values[1]) / abs(values[1]), "gradient": max(gaps)}


def run_objective(objective: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    items = count_items(objective, batch, model)
    prepared = next(iter(prepare_batches(objective, model, [batch])))
    loss: Tensor = objective(model, prepared, items).loss
    loss.backward()
    return loss.detach()


# --- pairs


def draw_rows(lengths: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of rows 2i (chosen) and 2i + 1 (rejected)."""
    generator = torch.Generator().manual_seed(7)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    rows = []
    for prompt, chosen, rejected in lengths:
        shared = draw(prompt)
        rows += [(shared, draw(chosen)), (shared, draw(rejected))]
    return rows


def pad(rows: Sequence[Sequence[int]], fill: int = 0, left: bool = False) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [
            [*[fill] * (width - len(row)), *row] if left else [*row, *[fill] * (width - len(row))]
            for row in rows
        ]
    )


def our_pairs(rows: Any, **more: Tensor) -> dict[str, Tensor]:
    ids = pad([[*prompt, *answer] for prompt, answer in rows])
    labels = pad([[*[-100] * len(prompt), *answer] for prompt, answer in rows], -100)
    mask = pad([[1] * (len(prompt) + len(answer)) for prompt, answer in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, **more}


def their_pairs(rows: Any) -> dict[str, Tensor]:
    rows = [*rows[::2], *rows[1::2]]
    return {
        "input_ids": pad([[*prompt, *answer] for prompt, answer in rows]),
        "attention_mask": pad([[1] * (len(p) + len(a)) for p, a in rows]),
        "completion_mask": pad([[*[0] * len(p), *[1] * len(a)] for p, a in rows]),
    }


def their_split_pairs(rows: Any) -> dict[str, Tensor]:
    """The same rows as the CPO and ORPO trainers take them."""
    out = {}
    for name, some in (("chosen", rows[::2]), ("rejected", rows[1::2])):
        out[f"{name}_input_ids"] = pad([[*p, *a] for p, a in some])
        out[f"{name}_attention_mask"] = pad([[1] * (len(p) + len(a)) for p, a in some])
        out[f"{name}_labels"] = pad([[*[-100] * len(p), *a] for p, a in some], -100)
    return out


PAIR_ROW = {"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}
MARKED_ROW = {"prompt": "w3 w4", "completion": " w5", "label": True}


def open_trainer(
    kind: str, folder: Path, options: Mapping[str, Any], row: Any, **more: Any
) -> tuple[Any, Any]:
    """Return TRL's trainer and its model."""
    datasets = pytest.importorskip("datasets")
    modules = [trl]
    with contextlib.suppress(ImportError):
        modules.append(__import__(f"trl.experimental.{kind.lower()}", fromlist=[kind]))
    owner = next(m for m in reversed(modules) if hasattr(m, f"{kind}Trainer"))
    config = getattr(owner, f"{kind}Config")(
        output_dir=str(folder / "out"),
        **{"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False},
        **{"per_device_train_batch_size": 8, "remove_unused_columns": False},
        **options,
    )
    model = open_theirs(folder, "reward" if kind == "Reward" else "policy")
    data = datasets.Dataset.from_list([dict(row) for _ in range(8)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
    trainer = getattr(owner, f"{kind}Trainer")(
        model=model, args=config, train_dataset=data, processing_class=tokenizer, **more
    )
    trainer.model.eval()
    return trainer, trainer.model


PAIR_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dpo": ("sigmoid", {}, {}),
    "robust": ("robust", {"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "hinge": ("hinge", {}, {}),
    "ipo": ("ipo", {}, {}),
    "sigmoid_norm": ("sigmoid_norm", {}, {}),
}


@pytest.mark.parametrize("nll_weight", [0.0, 0.5])
@pytest.mark.parametrize("method", PAIR_CASES)
def test_methods_with_a_reference(
    method: str, nll_weight: float, folder: Path, compare: Any
) -> None:
    name, theirs, ours = PAIR_CASES[method]
    rows = draw_rows(EQUAL if nll_weight else LENGTHS)
    loss_type = [name, "sft"] if nll_weight else name
    more = {"loss_weights": [1.0, nll_weight]} if nll_weight else {}
    options = {"loss_type": loss_type, "beta": 0.1, **theirs, **more}
    reference = open_theirs(folder, "reference")
    trainer, model = open_trainer("DPO", folder, options, PAIR_ROW, ref_model=reference)
    wanted = trainer.compute_loss(model, their_pairs(rows))
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    kept = frozen_copy(AutoModel.from_pretrained(folder / "reference", dtype=torch.float32))
    objective = PairObjective(method, MethodOptions(beta=0.1, nll_weight=nll_weight, **ours), kept)
    compare(own, model, (run_objective(objective, own, our_pairs(rows)), wanted))


REFERENCE_FREE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cpo": ("CPO", {"cpo_alpha": 1.0, "label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    "simpo": (
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
        {},
    ),
    "orpo": ("ORPO", {}, {}),
}


@pytest.mark.parametrize("method", REFERENCE_FREE)
def test_methods_without_a_reference(method: str, folder: Path, compare: Any) -> None:
    kind, theirs, ours = REFERENCE_FREE[method]
    rows = draw_rows(LENGTHS if method == "simpo" else EQUAL)
    trainer, model = open_trainer(kind, folder, theirs, PAIR_ROW)
    wanted = trainer.compute_loss(model, their_split_pairs(rows))
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    defaults = METHODS[method]
    options = MethodOptions(beta=defaults.beta, nll_weight=defaults.nll_weight, **ours)
    objective = PairObjective(method, options, None, nll_on_prompt=method == "orpo")
    compare(own, model, (run_objective(objective, own, our_pairs(rows)), wanted))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
def test_kto(weights: tuple[float, float], folder: Path, compare: Any) -> None:
    rows = draw_rows([*LENGTHS, *LENGTHS])
    answers, mismatched = rows[::2], [*rows[3::2], rows[1]]
    # Row 2i + 1 of bmforge: the prompt of row 2i with the answer to another prompt.
    pairs = [(answers[n][0], mismatched[n][1]) for n in range(len(answers))]
    is_good = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1])
    theirs: dict[str, Any] = {"label": is_good.bool()}
    for prefix, some in (("", answers), ("KL_", pairs)):
        theirs[f"{prefix}input_ids"] = pad([[*p, *a] for p, a in some])
        theirs[f"{prefix}attention_mask"] = pad([[1] * (len(p) + len(a)) for p, a in some])
        theirs[f"{prefix}completion_mask"] = pad([[*[0] * len(p), *[1] * len(a)] for p, a in some])
    options = {"beta": 0.1, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    reference = open_theirs(folder, "reference")
    trainer, model = open_trainer("KTO", folder, options, MARKED_ROW, ref_model=reference)
    wanted = trainer.compute_loss(model, theirs)
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    kept = frozen_copy(AutoModel.from_pretrained(folder / "reference", dtype=torch.float32))
    chosen = MethodOptions(beta=0.1, desirable_weight=weights[0], undesirable_weight=weights[1])
    batch = our_pairs([row for both in zip(answers, pairs, strict=True) for row in both])
    del batch["attention_mask"]
    batch["is_good"] = is_good
    found = run_objective(UnpairedObjective(chosen, kept), own, batch)
    compare(own, model, (found, wanted))


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_reward_model(center: float, folder: Path, compare: Any) -> None:
    rows = draw_rows(LENGTHS)
    margin = torch.tensor([0.0, 0.5, 1.0, 0.2])
    options = {"center_rewards_coefficient": center or None}
    trainer, model = open_trainer("Reward", folder, options, PAIR_ROW)
    theirs = their_pairs(rows) | {"margin": margin}
    del theirs["completion_mask"]
    wanted = trainer.compute_loss(model, theirs)
    own = AutoModel.from_pretrained(folder / "reward", dtype=torch.float32)
    found = run_objective(RewardObjective(center), own, our_pairs(rows, margin=margin))
    compare(own, model, (found, wanted))


# --- reinforcement learning

ANSWERS = [(3, 5), (2, 1), (4, 8), (3, 3), (2, 6), (5, 4)]


def draw_answers() -> list[RolloutAnswer]:
    generator = torch.Generator().manual_seed(3)
    answers = []
    for number, (prompt, length) in enumerate(ANSWERS):
        ids = torch.randint(3, VOCAB, (prompt + length,), generator=generator).tolist()
        drift = torch.randn(3, length, generator=generator, dtype=torch.float64) * 0.2
        logs = -3.5 + drift
        advantage = float(torch.randn((), generator=generator))
        answers.append(
            RolloutAnswer(number, ids[:prompt], ids[prompt:], "", [0.0] * length, "stop")
        )
        answers[-1].advantage = [advantage] * length
        answers[-1].sampler, answers[-1].old, answers[-1].reference = logs.tolist()
    return answers


def center_logprobs(model: Any, answers: Sequence[RolloutAnswer], temperature: float) -> None:
    """Move the old and reference values near the policy's, so that clips act on some tokens."""
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_ids, *answer.ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0] / temperature
        own = logits.log_softmax(-1)[len(answer.prompt_ids) - 1 : -1]
        own = own.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].double()
        for name in ("old", "reference", "sampler"):
            moved = own + torch.tensor(getattr(answer, name)) + 3.5
            setattr(answer, name, moved.tolist())


def their_answers(answers: Sequence[RolloutAnswer]) -> dict[str, Tensor]:
    def columns(name: str) -> Tensor:
        return torch.tensor(
            [[*getattr(a, name), *[0.0] * (MAX_TOKENS - len(a.ids))] for a in answers]
        ).float()

    mask = pad([[1] * len(a.ids) for a in answers])
    return {
        "prompt_ids": pad([a.prompt_ids for a in answers], left=True),
        "prompt_mask": pad([[1] * len(a.prompt_ids) for a in answers], left=True),
        "completion_ids": pad([a.ids for a in answers]),
        "completion_mask": mask,
        "advantages": torch.tensor([a.advantage[0] for a in answers]),
        "old_per_token_logps": columns("old"),
        "ref_per_token_logps": columns("reference"),
        "old_logps": columns("old").sum(1),
        "num_items_in_batch": mask.sum(),
    }


def give_reward(completions: Sequence[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
# method, fields of Policy that differ, TRL's options
POLICY_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo with kl": ("grpo", {"beta": 0.2}, {"loss_type": "grpo", "beta": 0.2}),
    "grpo, plain kl": (
        "grpo",
        {"beta": 0.2, "kl_importance": False},
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
    ),
    # TRL's delta also bounds ratios of positive advantages, which matters only below 1 + epsilon.
    "dual clip": ("grpo", {"clip_dual": 1.25}, {"loss_type": "grpo", "delta": 1.25}),
    "dr_grpo": ("dr_grpo", {"beta": 0.1}, {"loss_type": "dr_grpo", "beta": 0.1}),
    "dapo": ("dapo", {"beta": 0.1}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1}),
    "cispo": ("cispo", {"clip_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "gspo": ("gspo", {}, {"loss_type": "grpo", **GSPO}),
    "luspo": (
        "gspo",
        {"normalize": "sum"},
        {"loss_type": "luspo", **GSPO},
    ),
    "entropy": (
        "dapo",
        {"entropy_bonus": 0.02},
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.02},
    ),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("case", POLICY_CASES)
def test_policy_methods(case: str, temperature: float, folder: Path, compare: Any) -> None:
    method, ours, theirs = POLICY_CASES[case]
    options = {
        **{"temperature": temperature, "max_completion_length": MAX_TOKENS},
        **{"num_generations": 2, **theirs},
    }
    more: dict[str, Any] = {"reward_funcs": give_reward}
    trainer, model = open_trainer("GRPO", folder, options, {"prompt": "w3 w4"}, **more)
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    answers = draw_answers()
    center_logprobs(own, answers, temperature)
    wanted = trainer.compute_loss(model, their_answers(answers))
    policy = Policy(**{**POLICIES[method], **ours})
    objective = PolicyObjective(policy, temperature, MAX_TOKENS)
    names = ("old", "reference") if policy.beta else ("old",)
    found = run_objective(objective, own, collate_answers(answers, names))
    compare(own, model, (found, wanted))


@pytest.mark.parametrize("case", ["grpo with kl", "grpo, plain kl", "dapo", "dr_grpo", "cispo"])
def test_policy_methods_on_degenerate_answers(case: str, folder: Path, compare: Any) -> None:
    """Answers of one token, which are equal, and a group whose advantages are all 0."""
    method, ours, theirs = POLICY_CASES[case]
    options = {"max_completion_length": MAX_TOKENS, "num_generations": 2, **theirs}
    more: dict[str, Any] = {"reward_funcs": give_reward}
    trainer, model = open_trainer("GRPO", folder, options, {"prompt": "w3 w4"}, **more)
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    answers = draw_answers()
    for name in ("ids", "advantage", "sampler", "old", "reference"):
        setattr(answers[0], name, getattr(answers[0], name)[:1])
        setattr(answers[1], name, list(getattr(answers[0], name)))
    answers[1].prompt_ids = list(answers[0].prompt_ids)
    for answer in answers[2:]:
        answer.advantage = [0.0] * len(answer.ids)
    center_logprobs(own, answers, 1.0)
    wanted = trainer.compute_loss(model, their_answers(answers))
    policy = Policy(**{**POLICIES[method], **ours})
    objective = PolicyObjective(policy, 1.0, MAX_TOKENS)
    names = ("old", "reference") if policy.beta else ("old",)
    found = run_objective(objective, own, collate_answers(answers, names))
    compare(own, model, (found, wanted))


def test_rloo(folder: Path, compare: Any) -> None:
    options = {"max_completion_length": MAX_TOKENS, "num_generations": 2}
    more: dict[str, Any] = {"reward_funcs": give_reward}
    trainer, model = open_trainer("RLOO", folder, options, {"prompt": "w3 w4"}, **more)
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    answers = draw_answers()
    center_logprobs(own, answers, 1.0)
    wanted = trainer.compute_loss(model, their_answers(answers))
    policy = Policy(**{**POLICIES["rloo"], "beta": 0.0})  # its KL is part of the reward
    objective = PolicyObjective(policy, 1.0, MAX_TOKENS)
    found = run_objective(objective, own, collate_answers(answers, ("old",)))
    compare(own, model, (found, wanted))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta: float, folder: Path, compare: Any) -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = open_theirs(folder, "policy"), open_theirs(folder, "reference")
    answers = draw_answers()
    batch = collate_answers(answers)
    logits = [
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        for model in (student, teacher)
    ]
    labels = batch["labels"][:, 1:]
    wanted = GKDTrainer.generalized_jsd_loss(logits[0], logits[1].detach(), labels, beta, 0.8)
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    kept: Any = AutoModel.from_pretrained(folder / "reference", dtype=torch.float32)
    objective = DistillationObjective(kept.eval().requires_grad_(False), beta, 0.8)
    loss = objective(own, batch, int((labels != -100).sum())).loss
    loss.backward()
    compare(own, student, (loss.detach(), wanted))


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 4), (0.3, 6), (1.0, 1), (1.0, 8)])
def test_top_k_distillation(beta: float, top_k: int, folder: Path, compare: Any) -> None:
    """TRL's divergence over a sparse support with its tail bucket, at the teacher's top k."""
    from trl.experimental.server_distillation.server_distillation_trainer import (
        _add_tail_bucket,
        _jsd_divergence,
    )

    student, teacher = open_theirs(folder, "policy"), open_theirs(folder, "reference")
    batch = collate_answers(draw_answers())
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logs = [(model(**inputs).logits[:, :-1] / 0.8).log_softmax(-1) for model in (student, teacher)]
    best, ids = logs[1].detach().topk(top_k, -1)
    is_valid = torch.ones_like(ids, dtype=torch.bool)
    sparse, support = _add_tail_bucket(logs[0].gather(-1, ids), is_valid)
    divergence = _jsd_divergence(sparse, _add_tail_bucket(best, is_valid)[0], beta, support)
    is_scored = batch["labels"][:, 1:] != -100
    wanted = divergence.sum(-1)[is_scored].mean()
    own = AutoModel.from_pretrained(folder / "policy", dtype=torch.float32)
    kept: Any = AutoModel.from_pretrained(folder / "reference", dtype=torch.float32)
    objective = DistillationObjective(kept.eval().requires_grad_(False), beta, 0.8, top_k=top_k)
    (prepared,) = prepare_batches(objective, own, [batch])
    loss = objective(own, prepared, int(is_scored.sum())).loss
    loss.backward()
    compare(own, student, (loss.detach(), wanted))


# --- rewards


def test_rewards_of_trl_run_unchanged() -> None:
    """Functions of TRL's package, by name in a process of their own and passed as objects."""
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    texts = ["<think>a</think>b", "a</think>b", "<think>a<think>b</think>c", "b"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ids = [list(range(count)) for count in (1, 5, 7, 9)]
    batch = {"prompts": [""] * 4, "completions": completions, "completion_ids": ids}
    overlong = get_soft_overlong_punishment(8, 4)
    rewards = open_rewards(["trl.rewards:think_format_reward", overlong])
    try:
        scores = list(rewards.score(batch).values())
        assert rewards.failures == dict.fromkeys(rewards.names, 0)
    finally:
        rewards.close()
    assert scores[0] == think_format_reward(completions)
    assert sum(scores[0]) in (1.0, 2.0)
    assert scores[1] == overlong(completion_ids=ids)
