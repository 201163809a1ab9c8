"""Draw all pictures of the pages into docs/pictures.

    python dev/pictures/draw.py

`workflow.svg` is drawn by hand. `tests/architecture` checks that the files are up to date and that
every picture has a text that replaces it.
"""

from __future__ import annotations

from pathlib import Path

from charts import CHARTS
from diagrams import DIAGRAMS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

if __name__ == "__main__":
    for name, draw in (DIAGRAMS | CHARTS).items():
        draw().save(FOLDER / f"{name}.svg")
