"""ModelCenter's tools that write corpora: `indexed_dataset` and `preprocess_cpm1_lm`."""
