"""Rollouts: groups, states, batches and the sampler's log-probabilities."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.policy import Policy, PolicyConfig
from bmforge.align.reinforcement import PolicyObjective, PolicyScores, open_reference
from bmforge.align.rewards import RewardSet, open_rewards
from bmforge.align.rollout_batches import RolloutAnswer, collate_answers
from bmforge.align.rollout_config import PromptRow, RolloutConfig
from bmforge.align.rollout_metrics import CompletionLog, metric_names
from bmforge.align.rollouts import RolloutLoader, RolloutRanks
from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig

END = 2


@dataclasses.dataclass
class Sizes:
    global_batch_size: int = 8
    micro_batch_size: int = 3
    seed: int = 5


def make_model(kind: str = "llama", **more: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    if kind == "gpt2":
        return GPT2.from_config(GPT2Config(**sizes, max_seq_len=64, **more), seed=1)
    sizes |= {"intermediate_size": 24, "num_kv_heads": 1, "max_seq_len": 64, "init_std": 0.2}
    return Llama.from_config(LlamaConfig(**sizes, **more), seed=1)


def score_low(completion_ids: Sequence[Sequence[int]], bonus: Sequence[int], **_: Any) -> Any:
    return [sum(id < 10 for id in ids) + b for ids, b in zip(completion_ids, bonus, strict=True)]


PROMPTS = [PromptRow(tuple(range(3, 4 + n % 5)), f"prompt {n}", {"bonus": n}) for n in range(7)]


def open_loader(
    model: Any,
    policy: Policy | None = None,
    rewards: RewardSet | None = None,
    sizes: Sizes | None = None,
    place: tuple[int, int] = (0, 1),
    **rollout: Any,
) -> RolloutLoader:
    config = RolloutConfig(**{"num_generations": 4, "max_new_tokens": 6, **rollout})
    policy = policy or Policy()
    loader = RolloutLoader(
        PROMPTS,
        rewards or open_rewards([score_low]),
        config,
        policy,
        sizes or Sizes(),
        lambda ids: " ".join(map(str, ids)),
        RolloutRanks(*place, *place),
    )
    options = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        do_sample=True,
        temperature=config.temperature,
        eos_token_id=(END,),
        logprobs=0,
        logprobs_mode="processed_logprobs",
    )
    reference = open_reference(model, True) if policy.beta else None
    with_old = "old" in loader.names or policy.kl_in == "reward"
    scores = PolicyScores(model, config.temperature, with_old, reference)
    loader.begin(AnswerWriter(model, 16, 24, options), scores)
    return loader


def rows_of(batches: Any) -> list[list[int]]:
    return [
        [id for id, m in zip(row, mask, strict=True) if m]
        for batch in batches
        for row, mask in zip(
            batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True
        )
    ]


def test_a_group_has_distinct_answers_with_advantages_of_its_rewards() -> None:
    loader = open_loader(make_model())
    batches = next(loader)
    assert [batch["input_ids"].shape[0] for batch in batches] == [3, 3, 3]
    answers = loader._answers
    assert [a.prompt for a in answers] == [0] * 4 + [1] * 4
    assert len({tuple(a.ids) for a in answers}) > 4
    for first in (0, 4):
        group = answers[first : first + 4]
        rewards = torch.tensor([a.reward for a in group], dtype=torch.float64)
        content = loader.prompt(group[0].prompt).columns["bonus"]
        assert rewards.tolist() == [sum(id < 10 for id in a.ids) + content for a in group]
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found = torch.tensor([a.advantage[0] for a in group], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    last = batches[-1]
    assert last["labels"][2].tolist() == [-100] * last["labels"].shape[1]  # a slot beyond 8


def test_prompts_are_used_once_per_epoch_in_a_new_order() -> None:
    loader = open_loader(make_model())
    first = [loader.prompt(n).content for n in range(7)]
    second = [loader.prompt(n).content for n in range(7, 14)]
    assert sorted(first) == sorted(second) == sorted(row.content for row in PROMPTS)
    assert first != second


def test_ranks_write_the_rows_of_one_process() -> None:
    """Each rank's part, put together, is what one process writes: the exchange is replaced."""
    model = make_model()
    alone = open_loader(model)
    next(alone)
    parts = []
    for rank in range(2):
        loader = open_loader(model, place=(rank, 2))
        numbers = range(2)[rank::2]
        parts.append(loader._write(numbers))
    merged = [a for number in range(2) for a in (parts[0] | parts[1])[number]]
    plain = [
        dataclasses.replace(a, advantage=[], reward=None, is_masked=False) for a in alone._answers
    ]
    assert merged == plain


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_samplers_logprobs_are_the_policys(kind: str, temperature: float) -> None:
    model = make_model(kind)
    loader = open_loader(model, temperature=temperature, num_iterations=2)
    objective = PolicyObjective(Policy(), temperature, 6)
    for batch in next(loader):
        assert set(batch) >= {"old", "sampler", "advantages"}
        mask = batch["labels"] != -100
        torch.testing.assert_close(batch["old"], batch["sampler"], rtol=0, atol=2e-5)
        logits = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logprobs = (logits / temperature).log_softmax(-1)[:, :-1]
        wanted = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        gap = (batch["old"][:, 1:] - wanted)[mask[:, 1:]]
        if len(gap):
            assert gap.abs().max() < 2e-5
            metrics = objective(model, batch, 1.0).metrics
            assert metrics["sampling/sampling_logp_difference/max"] < 2e-5
            # Exactly 1: the old log-probabilities are from micro-batches of the same shape.
            scores = PolicyScores(model, temperature, True, None).score(batch)["old"]
            assert torch.equal(scores, batch["old"])


def test_answers_of_several_updates_are_used_again() -> None:
    loader = open_loader(make_model(), num_iterations=2, steps_per_generation=2)
    steps = [rows_of(next(loader)) for _ in range(8)]
    assert steps[0] == steps[2] != steps[1] == steps[3]
    assert steps[4] == steps[6] != steps[0]


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_a_resumed_loader_goes_on_with_the_same_rows(stop: int) -> None:
    policy = Policy(beta=0.1)
    model = make_model()
    options = {"num_iterations": 2, "steps_per_generation": 2}
    whole = open_loader(model, policy, **options)
    steps = [next(whole) for _ in range(7)]
    first = open_loader(model, policy, **options)
    for _ in range(stop):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = open_loader(model, policy, **options)
    second.load_state_dict(state)
    for wanted in steps[stop:]:
        for found, expected in zip(next(second), wanted, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_state_of_other_prompts_or_sizes_is_refused() -> None:
    loader = open_loader(make_model())
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="seed=5, but this run has seed=6"):
        open_loader(make_model(), sizes=Sizes(seed=6)).load_state_dict(state)
    with pytest.raises(ConfigError, match="sizes="):
        open_loader(make_model(), num_generations=2).load_state_dict(state)


def test_unscored_and_truncated_answers_leave_the_loss_and_its_denominator() -> None:
    def some(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [None if n % 4 == 1 else float(n) for n in range(len(completion_ids))]

    rewards = open_rewards([some])
    loader = open_loader(make_model(), rewards=rewards, mask_truncated_completions=True)
    batches = next(loader)
    answers = loader._answers
    left_out = [a for a in answers if a.finish_reason == "length" or a.reward is None]
    assert any(a.finish_reason == "length" for a in answers)
    assert left_out
    assert [a.is_masked for a in answers] == [a in left_out for a in answers]
    assert all(set(a.advantage) == {0.0} for a in left_out)
    for normalize, wanted in (
        ("sequence", len(answers) - len(left_out)),
        ("token", sum(len(a.ids) for a in answers if not a.is_masked)),
    ):
        objective = PolicyObjective(Policy(normalize=normalize), 1.0, 6)  # type: ignore[arg-type]
        assert sum(objective.count(batch) for batch in batches) == wanted


def test_rewards_of_truncated_answers_count_in_their_group() -> None:
    """As in TRL: only the loss of a truncated answer is masked."""
    loader = open_loader(make_model(), mask_truncated_completions=True)
    next(loader)
    is_cut = [a.finish_reason == "length" for a in loader._answers]
    assert any(any(is_cut[i : i + 4]) and not all(is_cut[i : i + 4]) for i in (0, 4))
    for start in (0, 4):
        group = loader._answers[start : start + 4]
        rewards = [a.reward for a in group]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
        wanted = [0.0 if a.is_masked else (a.reward - mean) / (spread + 1e-4) for a in group]
        assert [a.advantage[0] for a in group] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_whitened_advantages_are_those_of_all_tokens(beta: float) -> None:
    """With and without a KL term: longer answers have a larger weight in the mean."""
    loader = open_loader(make_model(), PolicyConfig(beta=beta).resolve("reinforce++"))
    next(loader)
    rewards = [a.reward for a in loader._answers for _ in a.ids]
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    found = [value for a in loader._answers for value in a.advantage]
    assert len({len(a.ids) for a in loader._answers}) > 1
    assert found == pytest.approx([(r - mean) / (spread + 1e-4) for r in rewards], abs=1e-6)


def test_long_answers_lose_reward_linearly() -> None:
    loader = open_loader(make_model(), overlong_tokens=4)
    next(loader)
    for answer in loader._answers:
        plain = answer.rewards["score_low"]
        assert plain is not None
        assert answer.reward == plain - max(0, len(answer.ids) - 2) / 4


@pytest.mark.parametrize("method", ["rloo", "reinforce++"])
def test_the_kl_is_subtracted_from_the_reward(method: str) -> None:
    policy = PolicyConfig(beta=0.5).resolve(method)
    model = make_model()
    loader = open_loader(model, policy)
    with torch.no_grad():  # the reference is a copy of the weights before
        model.lm_head.weight.mul_(1.5)
    next(loader)
    kls = [
        [old - ref for old, ref in zip(a.old, a.reference, strict=True)] for a in loader._answers
    ]
    assert max(abs(value) for row in kls for value in row) > 1e-3
    rewards = [a.reward - 0.5 * sum(kl) for a, kl in zip(loader._answers, kls, strict=True)]
    if method == "rloo":
        for n, answer in enumerate(loader._answers):
            start = n // 4 * 4
            others = [rewards[i] for i in range(start, start + 4) if i != n]
            assert answer.advantage == pytest.approx(
                [rewards[n] - sum(others) / 3] * len(answer.ids), rel=1e-6
            )
        return
    returns = [
        a.reward - 0.5 * sum(kl[t:])
        for a, kl in zip(loader._answers, kls, strict=True)
        for t in range(len(kl))
    ]
    values = torch.tensor(returns, dtype=torch.float64)
    wanted = (values - values.mean()) / (values.std() + 1e-4)
    found = torch.tensor([value for a in loader._answers for value in a.advantage])
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_step_does_not_depend_on_micro_batches() -> None:
    model = make_model().double()
    results = []
    for size in (1, 3, 8):
        loader = open_loader(make_model(), sizes=Sizes(micro_batch_size=size))
        objective = PolicyObjective(Policy(normalize="token"), 1.0, 6)
        batches = next(loader)
        items = sum(objective.count(batch) for batch in batches)
        model.zero_grad()
        loss = sum(objective(model, batch, items).loss for batch in batches)
        loss.backward()
        results.append((loss.detach(), model.lm_head.weight.grad.clone()))
    for loss, grad in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-9, atol=1e-12)


def test_metrics_have_the_names_that_are_declared() -> None:
    loader = open_loader(make_model())
    next(loader)
    names = metric_names(["score_low"])
    assert loader.metrics.keys() <= set(names)
    lengths = [len(a.ids) for a in loader._answers]
    assert loader.metrics["completions/mean_length"] == sum(lengths) / 8
    assert loader.metrics["rewards/score_low/failures"] == 0
    values = [a.reward for a in loader._answers]
    assert loader.metrics["reward"] == pytest.approx(sum(values) / 8)


def test_the_table_of_answers_has_no_row_twice_after_a_kill(tmp_path: Path) -> None:
    def row(step: int, log: CompletionLog) -> None:
        answer = RolloutAnswer(
            step, [1], [2], f"text {step}", [0.0], "stop", {"f": 1.0}, 1.0, [0.5]
        )
        other = dataclasses.replace(answer, prompt=step + 100)
        log.write(step, [answer, other], ["p", "p"])

    log = CompletionLog(tmp_path, 1, 1)
    for step in (1, 2, 3):
        row(step, log)
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"step": 4, "pro')  # torn by the kill
    log = CompletionLog(tmp_path, 1, 3)
    row(3, log)
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0])["advantage"] == 0.5


def test_padding_changes_no_answer() -> None:
    answer = RolloutAnswer(0, [5, 6], [7, 8], "", [-1.0, -2.0], "stop", advantage=[0.5, 0.5])
    longer = dataclasses.replace(answer, ids=[7] * 9, sampler=[-1.0] * 9, advantage=[0.1] * 9)
    alone = collate_answers([answer], ("sampler",))
    wide = collate_answers([answer, longer, None], ("sampler",))
    assert alone["labels"].tolist() == [[-100, -100, 7, 8]]
    assert alone["sampler"].tolist() == [[0, 0, -1, -2]]
    for name, tensor in alone.items():
        assert wide[name][0, :4].tolist() == tensor[0].tolist()
    assert wide["attention_mask"].sum(1).tolist() == [4, 11, 2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_generations": 3}, "multiple of rollout.num_generations=3"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"overlong_tokens": 9}, "overlong_tokens=9"),
        ({"num_iterations": 0}, "num_iterations=0"),
        ({"max_num_seqs": 2}, "max_num_seqs=2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_loader(make_model(), **fields)


def test_rollouts_without_any_reward_end_the_run() -> None:
    """Three failed rollouts in a row, or a whole run, raise an error; a short outage does not."""
    outage = [True, True, False, True, True, True]

    def score(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        if outage[trainer_state.global_step]:
            raise ValueError("server is down")
        return [float(n) for n in range(len(completion_ids))]

    loader = open_loader(make_model(), rewards=open_rewards([score]))
    for _ in range(5):
        next(loader)
    resumed = open_loader(make_model(), rewards=open_rewards([score]))
    resumed.load_state_dict(loader.state_dict())
    for each in (loader, resumed):
        with pytest.raises(ConfigError, match=r"last 3 rollouts .* score: .*server is down"):
            next(each)

    short = open_loader(make_model(), rewards=open_rewards([score]))
    short._max_steps = 2
    next(short)
    with pytest.raises(ConfigError, match="last 2 rollouts has a reward"):
        next(short)


def test_a_function_that_returns_only_none_ends_the_run_at_its_last_rollout() -> None:
    def skip(completions: Any, **_: Any) -> list[None]:
        return [None for _ in completions]

    loader = open_loader(make_model(), rewards=open_rewards([skip]))
    loader._max_steps = 5
    for _ in range(4):
        next(loader)
    with pytest.raises(ConfigError, match="returned only None"):
        next(loader)
