"""Pipeline parallelism: stages, schedules and messages; start reading at `model.py`."""
