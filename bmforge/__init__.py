"""bmforge: pretrain, fine-tune and run large models on modest hardware.

Start reading at `recipes/`, which has complete runs, then `train/trainer.py` and `models/gpt2.py`.
CONTRIBUTING.md describes the packages and which other packages each may import.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
