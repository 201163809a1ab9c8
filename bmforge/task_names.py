"""Names and descriptions of the tasks of `bmforge train`; `recipes` implements them."""

from __future__ import annotations

from collections.abc import Mapping

from bmforge.errors import ConfigError, suggest

__all__ = ["ALSO", "OLD_NAMES", "PUBLISHED", "TASK_NAMES", "check_task"]

TASK_NAMES: Mapping[str, str] = {
    "pretrain": (
        "pretrain on prepared text with the family's objective: next token, masked tokens, spans"
    ),
    "conversations": "fine-tune on conversations",
    "preferences": "optimize for preferred answers: DPO, IPO, SimPO, ORPO, CPO, KTO",
    "reward": "train a reward model on pairs of answers",
    "classify": (
        "fine-tune on a task with labels or choices; the task's name can replace `classify`"
    ),
    "prompt-classify": "classify with a prompt template, few-shot or zero-shot",
    "prompt-generate": "train to generate the text at the mask of a template",
    "squad": "fine-tune on extractive question answering",
    "dialogue": "train on dialogues",
    "documents": "train on CPM-Bee documents",
    "chid": "fine-tune to choose idioms (ChID)",
    "stc": "fine-tune to answer posts (STC)",
    "rl": "train on rewards of generated answers: GRPO and related algorithms",
    "distill": "distill a teacher into a student on the student's own answers (on-policy)",
    "images": "classify images by folder",
    "speech": "fine-tune a speech-to-text model on audio files with transcripts",
    "delta-search": "search adapter types, modules and sizes on a task with labels or choices",
}

# Aliases of tasks.
ALSO: Mapping[str, str] = {"sft": "conversations"}

# Former recipe names, each a task with a model.
OLD_NAMES: Mapping[str, str] = {
    "gpt2-pretrain": "pretrain a GPT-2 on prepared text",
    "llama-pretrain": "pretrain a Llama on prepared text",
    "cpm1-pretrain": "pretrain a CPM-1 on prepared text",
    "cpm1-chid": "fine-tune a CPM-1 to choose idioms (ChID)",
    "cpm1-stc": "fine-tune a CPM-1 to answer posts (STC)",
    "cpm2-pretrain": "train a CPM-2 to fill masked spans",
    "t5-pretrain": "train a T5 to fill masked spans",
    "bert-superglue": "fine-tune a BERT on a task",
    "t5-superglue": "fine-tune a T5 on a task",
    "gpt2-superglue": "fine-tune a GPT-2 on a task",
    "llama-superglue": "fine-tune a Llama on a task",
    "llama-sft": "fine-tune a Llama on conversations",
    "t5-squad": "fine-tune a T5 to answer questions about a text",
    "eva-dialogue": "train an EVA on dialogues",
    "cpm-ant-train": "train a CPM-Ant on masked tokens and text continuation",
    "cpm-bee-train": "train a CPM-Bee on documents",
}

# Published tasks, each under its own name.
PUBLISHED = (
    "BoolQ",
    "CB",
    "COPA",
    "RTE",
    "WiC",
    "WSC",
    "MultiRC",
    "ReCoRD",
    "eprstmt",
    "csl",
    "ocnli",
    "cmnli",
    "afqmc",
    "bustm",
    "tnews",
    "iflytek",
    "csldcp",
    "cluewsc2020",
    "cluewsc",
    "SQuAD",
    "cmrc2018",
    "drcd",
    "chid",
    "c3-m",
    "c3-d",
    "LCQMC",
    "ag_news",
    "dbpedia",
    "yahoo_answers",
    "amazon_polarity",
    "SST-2",
    "ChnSentiCorp",
    "MNLI",
    "SNLI",
    "TACRED",
    "Re-TACRED",
    "imdb",
    "Few-NERD",
    "LAMA",
    "WebNLG",
)


def check_task(name: str) -> None:
    """Raise `ConfigError` for an unknown task name.

    Upper and lower case are not distinguished in the names of published tasks.
    """
    published = [task.lower() for task in PUBLISHED]
    if name in TASK_NAMES or name in ALSO or name in OLD_NAMES or name.lower() in published:
        return
    if name.startswith("-"):
        raise ConfigError(
            f"the task is missing before {name} (tasks: {', '.join(TASK_NAMES)}). Example: "
            "bmforge train conversations --model DIR --data FILE."
        )
    hint = suggest(name, [*TASK_NAMES, *OLD_NAMES, *PUBLISHED])
    raise ConfigError(
        f"unknown task {name!r}.{hint} Run `bmforge train --help` for the list of tasks."
    )
