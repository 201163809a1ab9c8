"""BMCook's API, implemented with bmforge, for programs that only change their imports.

Start at `trainer.py` (`CookTrainer` sets up all methods); `config.py` reads the JSON files.
docs/migrating/bmcook.md lists every difference and its reason.
"""
