"""CPM-Pretrain's arguments and config files, as fields of a run."""
