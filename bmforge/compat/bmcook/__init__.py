"""BMCook's API over bmforge, for programs with changed import lines.

Start at `trainer.py` (`CookTrainer` sets up all methods); `config.py` reads the JSON files.
docs/migrating/bmcook.md lists every difference and its reason.
"""
