"""Tuning a model by few parameters, or by words: `delta/` has the parts that are trained."""
