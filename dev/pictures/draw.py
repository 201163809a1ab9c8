"""Draw all pictures of the pages into docs/pictures.

    python dev/pictures/draw.py

`tests/architecture` checks that the files are up to date and that pages give every picture an
alternative text.
"""

from __future__ import annotations

from pathlib import Path

from charts import CHARTS
from diagrams import DIAGRAMS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

if __name__ == "__main__":
    for name, draw in (DIAGRAMS | CHARTS).items():
        draw().save(FOLDER / f"{name}.svg")
