"""GRPO step (rollouts and update) compared with TRL's GRPOTrainer.

    python -m benchmarks.alignment.grpo_step [--hidden 256] [--layers 4] [--new-tokens 64]
        [--rounds 12]

Needs `pip install trl==1.16.0 datasets`. Both sides open the same random weights. A step samples 8
answers of equal length for each of 4 prompts, scores them with a Python function and updates the
weights with AdamW. TRL samples with transformers' `generate`. The steps alternate, and each side
runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import Contender, header, make_parser, paired_ratio, run_in_turns, table

PROMPTS, ANSWERS, VOCABULARY = 4, 8, 300
LEARNING_RATE = 1e-4
REWARD = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""
TEXTS = [f"w{n} w{n + 1} w{n + 2} w{n + 3}" for n in range(10, 10 + PROMPTS)]


def write_base(folder: Path, options: argparse.Namespace) -> None:
    """Write the model, its tokenizer and the reward function."""
    import tokenizers

    from bmforge.models import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_layers=options.layers,
        num_heads=4,
        num_kv_heads=4,
        max_seq_len=16 + options.new_tokens,
    )
    Llama.from_config(config, seed=0).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 2}))
    vocabulary = {f"w{n}": n for n in range(3, VOCABULARY)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    written = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    written.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    written.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<s>"}
    roles["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    (folder / "reward.py").write_text(REWARD)


def build_bmforge(folder: str, new_tokens: int) -> Callable[[], float]:
    """Return a step of bmforge: the loader samples the answers, the Trainer updates the model."""
    from bmforge.align.answer_writer import AnswerWriter
    from bmforge.align.policy import PolicyConfig
    from bmforge.align.reinforcement import PolicyObjective
    from bmforge.align.rewards import open_rewards
    from bmforge.align.rollout_config import PromptRow, RolloutConfig
    from bmforge.align.rollouts import RolloutLoader
    from bmforge.infer import GenerationConfig
    from bmforge.models import AutoModel
    from bmforge.tokenizers import AutoTokenizer
    from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer

    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [PromptRow(tuple(tokenizer.encode(text)), text, {}) for text in TEXTS]
    policy = PolicyConfig().resolve("grpo")
    rewards = open_rewards((f"{folder}/reward.py:digits",), 60.0, SimpleNamespace)
    batch = PROMPTS * ANSWERS
    loader = RolloutLoader(
        prompts,
        rewards,
        RolloutConfig(num_generations=ANSWERS, max_new_tokens=new_tokens),
        policy,
        SimpleNamespace(global_batch_size=batch, micro_batch_size=batch, seed=0),
        tokenizer.decode,
    )
    sampling = GenerationConfig(
        **{"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "eos_token_id": (2,)},
        **{"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
        **{"logprobs": 0, "logprobs_mode": "processed_logprobs"},
    )
    loader.begin(AnswerWriter(model, 64, 16 + new_tokens, sampling), None)
    loop = TrainConfig(
        optim=OptimConfig(lr=LEARNING_RATE, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
        disable_dropout=True,
    )
    trainer = Trainer(model, loader, loop, objective=PolicyObjective(policy, 1.0, new_tokens))
    return lambda: trainer.train_step()[0]["loss"]


def build_trl(folder: str, new_tokens: int) -> Callable[[], float]:
    """Return a step of TRL, whose trainer samples, scores and computes gradients in one call."""
    import datasets
    import transformers
    import trl

    config = trl.GRPOConfig(
        output_dir=f"{folder}/out",
        **{"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False},
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        learning_rate=LEARNING_RATE,
        loss_type="grpo",
    )
    rows = [{"prompt": text} for text in TEXTS for _ in range(ANSWERS)]
    scope: dict[str, Any] = {}
    exec(REWARD, scope)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        reward_funcs=scope["digits"],
    )
    trainer.current_gradient_accumulation_steps = 1  # usually set by `train`
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        loss = trainer.training_step(model, rows, None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trainer.state.global_step += 1
        return float(loss)

    return step


def main() -> None:
    """Print the seconds of a step and the ratio of the speeds."""
    parser = make_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget-s", type=float, default=120)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    packages = ("torch", "transformers", "trl")
    print(header(threads, packages))
    with tempfile.TemporaryDirectory() as folder:
        write_base(Path(folder), options)
        contenders = {
            "bmforge": Contender(build_bmforge, threads, folder, options.new_tokens, tuned=True),
            "TRL": Contender(build_trl, threads, folder, options.new_tokens, tuned=True),
        }
        for contender in contenders.values():
            contender.step()
        steps = run_in_turns(contenders, options.rounds, options.budget_s)
        for contender in contenders.values():
            contender.close()
    seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    tokens, rows = PROMPTS * ANSWERS * options.new_tokens, []
    for name, timed in seconds.items():
        median = statistics.median(timed)
        rows.append([name, f"{median:.3f}", f"{tokens / median:.0f}"])
    print(f"\n{len(seconds['TRL'])} rounds, {tokens} new tokens a step\n")
    print(table(["step", "s", "new tokens/s"], rows))
    print(f"\n{paired_ratio(seconds, 'bmforge', 'TRL')}")


if __name__ == "__main__":
    main()
