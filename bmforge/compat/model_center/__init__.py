"""ModelCenter's API over bmforge, for programs with changed import lines.

Start at `model` (the model classes), then `dataset` (task data ready to train on), `layer`,
`tokenizer` and `generation`. docs/migrating/model_center.md lists every numerical difference and
its reason.
"""
