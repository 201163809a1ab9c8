"""bmforge: pretrain, fine-tune and run large models on little hardware.

Start reading at `recipes/` (whole runs), then `train/trainer.py` and `models/gpt2.py`. The
packages, and what each may import, are described in CONTRIBUTING.md.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
