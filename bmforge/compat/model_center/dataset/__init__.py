"""Task data and corpora under ModelCenter's names.

Start at `rows.py` (the base class and prompts of the task datasets), then `bertdataset`,
`gpt2dataset`, `llamadataset`, `t5dataset`, `cpm1dataset` and `cpm2dataset`; their `DATASET` maps
task names to dataset classes. `loader.py` is the data loader; `indexed.py` reads token corpora,
`distributed_dataset.py` block datasets, `pretraining.py` the samples of CPM-1 and CPM-2.
"""
