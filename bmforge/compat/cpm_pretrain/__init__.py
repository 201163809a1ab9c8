"""CPM-Pretrain's API: its arguments, scripts, config files and Python names.

Start at `arguments.py` (the table of arguments), then `migrate.py`, which converts scripts to
configs of `bmforge train`. For programs that call `pretrain(...)` with their own functions start at
`training.py`, with `pipe.py` for `LayerSpec` and `mpu` for tensor-parallel layers.
"""
