"""Writing corpora as ModelCenter did: `indexed_dataset`, and `preprocess_cpm1_lm` to run."""
