"""Table of OpenPrompt's config keys: the fields that replace them, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DATASETS", "MISSING", "NEEDLESS", "PLAIN", "TEMPLATES", "VERBALIZERS"]

DATASETS = {
    **{"agnews": "ag_news", "amazon": "amazon_polarity", "dbpedia": "dbpedia", "imdb": "imdb"},
    **{"mnli": "MNLI", "sst-2": "SST-2", "yahoo": "yahoo_answers", "snli": "SNLI", "lama": "LAMA"},
    **{"tacred": "TACRED", "retacred": "Re-TACRED", "fewnerd": "Few-NERD"},
    **{"webnlg": "WebNLG", "webnlg_2017": "WebNLG"},
    **{name.lower(): name for name in ("BoolQ", "CB", "COPA", "RTE", "WiC", "WSC", "MultiRC")},
    "record": "ReCoRD",
}
PLAIN: Mapping[str, tuple[str, type]] = {
    "plm.model_path": ("init_from", str),
    "plm.optimize.weight_decay": ("train.optim.weight_decay", float),
    "plm.optimize.eps": ("train.optim.eps", float),
    "plm.optimize.adam_epsilon": ("train.optim.eps", float),
    "plm.optimize.betas": ("train.optim.betas", list),
    "dataset.path": ("data.paths", str),
    "dataloader.max_seq_length": ("data.seq_len", int),
    "dataloader.truncate_method": ("cut", str),
    "train.batch_size": ("data.micro_batch_size", int),
    "train.gradient_accumulation_steps": ("data.grad_accum_steps", int),
    "reproduce.seed": ("seed", int),
    "generation.max_new_tokens": ("max_new_tokens", int),
    "logging.path": ("run_dir", str),
}
# Beginnings of keys that ask for nothing that a run does not do anyway, or lie outside of it.
NEEDLESS = {
    "environment": "torchrun starts processes, and --layout divides a model",
    "logging": "a run writes its log, metrics and report into run_dir",
    "checkpoint": "checkpoints are written by train.save_every_steps and train.keep_last",
    "plm.model_name": "the model's directory says what it is",
    "plm.specials_to_add": "nothing is added to vocabularies",
    "plm.optimize.name": "AdamW is train.optim.name as usual",
    "plm.optimize.no_decay": "norms and biases are not decayed",
    "plm.optimize.scheduler.type": "",
    "train.teacher_forcing": "targets are always given in training",
    "train.shuffle_data": "examples come in an order of data.seed",
    "train.clean": "",
    "dev": "held-out batches are as large as data.micro_batch_size",
    "test": "held-out batches are as large as data.micro_batch_size",
    "valid": "held-out batches are as large as data.micro_batch_size",
    "classification.metric": "the task's own figures are written",
    "generation.metric": "the task's own figures are written",
    "train.num_epochs": "",
}
MISSING = {
    "generation": "texts are written greedily; see PromptGenerator.write for other ways",
    "dataloader.decoder_max_length": "targets are not cut; data.seq_len is of the prompt",
    "template_generator": "call bmforge.tune.prompt.search_templates",
    "verbalizer_generator": "call bmforge.tune.prompt.search_label_words",
    "classification.auto_t": "call bmforge.tune.prompt.search_templates",
    "classification.auto_v": "call bmforge.tune.prompt.search_label_words",
    "sampling_from_train.also_sample_dev": "data.dev_split is read whole",
    "sampling_from_train.num_examples_per_label_dev": "data.dev_split is read whole",
}
TEMPLATES = ("manual", "mixed", "ptr", "soft", "ptuning", "prefix_tuning", "lmbff")
VERBALIZERS = ("manual", "one2one", "ptr")
