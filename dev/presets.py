"""Write docs/reference/presets.md: every preset with its size, cost and cache.

    python dev/presets.py

Models are built on meta, so the largest costs no memory. `tests/architecture` checks the page.
"""

from __future__ import annotations

from pathlib import Path

from bmforge.models.base import Model
from bmforge.models.hub import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "presets.md"
INTRO = """# Presets

Look up the published sizes of each model family. A preset is a size without its weights. Use it as
`GPT2Config.preset("gpt2-small")` or `bmforge info gpt2-small`. `from_pretrained` accepts the names
of presets with a checkpoint in the last column. The FLOPs are counted per token, for the forward
and backward pass of a sequence of the maximum length. The cache bytes are the size of the bf16 KV
cache per token. `dev/presets.py` generates this page.
"""


def count_parameters(family: type[Model], name: str) -> int:
    """Return the number of parameters of a preset; tied parameters count once."""
    model = family.from_config(family.config_class.preset(name), device="meta")
    return sum(p.numel() for p in model.parameters())


def render() -> str:
    """Return the page."""
    parts = [INTRO]
    for title, family in FAMILIES.items():
        config_class = family.config_class
        parts.append(f"\n## {title}\n\n")
        parts.append(
            "| preset | parameters | training FLOPs per token | cache bytes | checkpoint |\n"
        )
        parts.append("|---|---|---|---|---|\n")
        for name in config_class.presets:
            config = config_class.preset(name)
            flops = config.flops_per_token(config.max_seq_len)
            cells = (
                f"`{name}`",
                f"{count_parameters(family, name):,}",
                f"{flops:.3g}",
                f"{config.kv_bytes_per_token():,}",
                config_class.hub_ids.get(name, ""),
            )
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
