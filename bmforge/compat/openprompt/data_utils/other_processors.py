"""OpenPrompt's readers of LAMA's facts and of UltraChat, which have special arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bmforge.compat.openprompt.data_utils.data_processor import DataProcessor
from bmforge.compat.openprompt.examples import InputExample
from bmforge.data.sources.text_files import read_text
from bmforge.data.tasks.task import read_records
from bmforge.errors import ConfigError, DataError

__all__ = ["OTHER_PROCESSORS", "LAMAProcessor", "UltraChatProcessor"]

_VOCABULARY_FILES = {"share": "29k-vocab.json", "lama": "34k-vocab.json"}


class LAMAProcessor(DataProcessor):
    """Reads the facts of one relation whose object is a single token of the model.

    Args:
        base_path: folder with `single_relations` and the files of allowed objects.
        model_name: kind of model, such as "bert"; selects the list of allowed objects.
        tokenizer: tokenizer of the model.
        vocab_strategy: "original" (all tokens), "share" or "lama" (the lists of LAMA's authors).
        relation_id: relation, such as "P1001".
    """

    def __init__(
        self,
        base_path: str | Path,
        model_name: str,
        tokenizer: Any,
        vocab_strategy: str,
        relation_id: str = "P1001",
    ) -> None:
        super().__init__()
        self.relation_id, self.tokenizer = relation_id, tokenizer
        path = Path(base_path) / "single_relations" / f"{relation_id}.jsonl"
        sentence = next(iter(read_records(path))).text("template").replace("[X]", "<text_a>")
        causal = "gpt" in model_name or "megatron" in model_name
        before, _, after = sentence.partition("[Y]")
        self.manual_template = before if causal else f"{before}<mask>{after}"
        self.label_mapping = tokenizer.get_vocab()
        names = self._allowed_names(Path(base_path), model_name, vocab_strategy)
        self.allowed_vocab_ids = [self.label_mapping[name] for name in names]

    def _allowed_names(self, folder: Path, model_name: str, strategy: str) -> list[str]:
        if strategy == "original":
            return self.labels
        if strategy not in _VOCABULARY_FILES:
            strategies = ", ".join(["original", *_VOCABULARY_FILES])
            raise ConfigError(
                f"unknown strategy: vocab_strategy={strategy!r} (known: {strategies})."
            )
        lists: dict[str, list[str]] = json.loads(read_text(folder / _VOCABULARY_FILES[strategy]))
        name = "gpt2-xl" if "gpt" in model_name else model_name
        if "roberta" in model_name or "megatron" in model_name:
            name = "roberta-large"
        if name not in lists:
            raise ConfigError(
                f"there is no vocabulary list for model_name={model_name!r} (known: "
                f"{', '.join(lists)})."
            )
        return lists[name]

    def get_manual_template(self) -> str:
        """Return the sentence of the relation as a template."""
        return self.manual_template

    def get_examples(self, data_dir: str | Path, split: str) -> list[InputExample]:
        """Return the relation's facts whose object is a single, allowed token."""
        folder = Path(data_dir) / "fact-retrieval" / "original" / self.relation_id
        allowed, examples = set(self.allowed_vocab_ids), []
        for number, row in enumerate(read_records(folder / f"{split}.jsonl")):
            text = " " + row.text("obj_label")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] in allowed:
                example = InputExample(str(number), row.text("sub_label"), label=ids[0])
                examples.append(example)
        return examples


class UltraChatProcessor(DataProcessor):
    """Reads UltraChat's conversations, with one example for each answer."""

    def get_examples(self, data_dir: str | Path, split: str = "") -> list[InputExample]:
        """Return one example per answer, with the earlier turns as `meta["context"]`.

        Args:
            data_dir: the JSON lines file.
            split: without effect; the dataset has one file.
        """
        examples: list[InputExample] = []
        for row in read_records(Path(data_dir)):
            turns = row.texts("data")
            if len(turns) % 2:
                raise DataError(
                    f"{row.place} has {len(turns)} turns (needed: an even number, since every "
                    "question needs an answer)."
                )
            named = [f"{('User', 'Assistant')[n % 2]}: {turn}" for n, turn in enumerate(turns)]
            for n in range(1, len(turns), 2):
                meta = {"context": named[:n]}
                examples.append(InputExample(str(len(examples)), meta=meta, tgt_text=turns[n]))
        return examples


OTHER_PROCESSORS: dict[str, type[DataProcessor]] = {
    "LAMA": LAMAProcessor,
    "ultrachat": UltraChatProcessor,
}
