"""Programs written for the old tools run here with their import lines changed and nothing else.

`bmtrain/` has the names of BMTrain, `model_center/` those of ModelCenter. Both are thin: every name
is a few lines over the engine. Start at docs/migrating.md, then `bmtrain/__init__.py`.
"""

__all__ = ["bmtrain", "model_center"]
