"""ModelCenter's API, implemented with bmforge, for programs that only change their imports.

Start at `model` (the model classes), then `dataset` (task data ready to train on), `layer`,
`tokenizer` and `generation`. docs/migrating/model_center.md lists every numerical difference and
its reason.
"""
