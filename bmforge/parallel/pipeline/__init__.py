"""Pipeline parallelism: stages, schedules and point-to-point messages; start at `model.py`."""
