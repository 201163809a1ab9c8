"""What commands may be told: settings that a room reads and the command line shows.

They stand here, where nothing heavy is imported, so that `--help` answers at once; each is also
found where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bmforge.errors import ConfigError

__all__ = ["ChatSettings", "PrepareConfig", "QuickstartConfig"]


@dataclass(frozen=True)
class PrepareConfig:
    """How to prepare a corpus.

    Args:
        vocab_size: token ids of the BPE tokenizer when one is trained, at least 257.
        validation_fraction: share of the text's bytes to hold out, 0 <= fraction < 1; of few
            documents, the end of one is taken.
        seed: decides which documents are held out.
        skip_bad: count bad lines and files instead of stopping at them.
        skip_unread: go on where more than half of the input's bytes are of kinds that are not read.
        text_field: the field of a .jsonl line that holds the text.
        tokenizer: directory of the tokenizer to use, of any kind that
            `bmforge.tokenizers.AutoTokenizer` opens: a model's, or another corpus's, so that
            several share one. Empty trains a new one.
    """

    vocab_size: int = 8192
    validation_fraction: float = 0.05
    seed: int = 0
    skip_bad: bool = False
    skip_unread: bool = False
    text_field: str = "text"
    tokenizer: str = ""


@dataclass(kw_only=True)
class QuickstartConfig:
    """What the quickstart may be told.

    Args:
        input: text files or directories; empty takes the help texts that Python carries.
        run_dir: where everything goes.
        steps: optimizer steps.
        fresh: start over: what an earlier quickstart left in `run_dir` is removed.
        prompt: what the samples go on from; empty takes the beginning of a held-out document.
        samples: how many samples to draw.
        prepare: how the text is prepared.
    """

    input: tuple[str, ...] = ()
    run_dir: Path = Path("runs/quickstart")
    steps: int = 600
    fresh: bool = False
    prompt: str = ""
    samples: int = 2
    prepare: PrepareConfig = field(
        default_factory=lambda: PrepareConfig(vocab_size=1024, validation_fraction=0.1)
    )


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How to answer; the defaults are the original's.

    Args:
        window: most tokens of the history that are read.
        no_repeat_ngram: no stretch of so many tokens comes twice in an answer; 0 lets all pass.
        max_new_tokens: longest answer.
        min_new_tokens: shortest one.
        num_beams: above 1, search with so many beams instead of drawing.
        temperature: of the drawing.
        top_p: draw among the likeliest that make up this probability.
        repetition_penalty: above 1, what was written becomes less likely.
        length_penalty: of a search with beams.
        seed: of the drawing; None uses torch's global generator.
    """

    window: int = 128
    no_repeat_ngram: int = 3
    max_new_tokens: int = 128
    min_new_tokens: int = 2
    num_beams: int = 1
    temperature: float = 0.7
    top_p: float = 0.9
    repetition_penalty: float = 1.2
    length_penalty: float = 1.8
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a number out of range."""
        if self.window < 3 or self.no_repeat_ngram < 0:
            raise ConfigError(
                f"ChatConfig: window={self.window} must be at least 3, and no_repeat_ngram="
                f"{self.no_repeat_ngram} at least 0."
            )
