"""Programs written for the old tools run here with their import lines changed and nothing else.

`bmtrain/` has the names of BMTrain, `model_center/` those of ModelCenter, `bminf/` those of BMInf,
`opendelta/` those of OpenDelta, and `cpm_pretrain/` runs CPM-Pretrain's scripts. All are thin:
every name is a few lines over the engine. Start at docs/migrating.md, then `bmtrain/__init__.py`.
"""

__all__ = ["bminf", "bmtrain", "cpm_pretrain", "model_center", "opendelta"]
