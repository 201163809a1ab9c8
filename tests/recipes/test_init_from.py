"""What a run starts from: its sizes are the checkpoint's, as the weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bmforge.models import Llama, LlamaConfig, load_weights_
from bmforge.recipes.sft import LlamaSFTConfig
from bmforge.recipes.start import complete_model_config
from bmforge.testing import assert_close


@pytest.mark.parametrize("says", [True, None])
def test_a_head_of_its_own(says: bool | None, tmp_path: Path) -> None:
    """A config.json that ties wrongly, or says nothing, trains what `from_pretrained` opens."""
    sizes = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        tie_word_embeddings=says is None,
    )
    model = Llama.from_config(sizes)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    line = next(line for line in text.splitlines() if "tie_word_embeddings" in line)
    file.write_text(text.replace(line, line.replace("false", "true") if says else ""))
    settled = complete_model_config(LlamaSFTConfig(init_from=str(tmp_path))).model
    assert settled.tie_word_embeddings is sizes.tie_word_embeddings
    started = load_weights_(Llama.from_config(settled, device="meta"), tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    assert_close(started.eval()(ids).logits, model.eval()(ids).logits)
