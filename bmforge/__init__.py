"""bmforge: train, adapt, compress and run big models with little hardware.

Start reading at `recipes/` (whole runs), then `train/trainer.py` and `models/gpt2.py`. The rooms:
`nn` and `models` (one block, one file per family), `data`, `parallel`, `train`, `infer`, `cli`.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
