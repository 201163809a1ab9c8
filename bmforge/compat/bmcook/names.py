"""Table of BMCook's public names and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# BMCook
ConfigParser | changed | unknown and contradictory keys raise an error; defaults are set at every \
level
ConfigParser.load ConfigParser.get ConfigParser.save | same
CookTrainer.set_compression | changed | supports several models, one after the other; masks are \
zeros in the weights; the projection of hidden states is trained
CookTrainer.forward | changed | uses the model that is passed; the Lagrangian is in `lag_loss`
CookOutput | changed | always has `lag_loss` and `moe_records` as well
BMDistill.set_forward | changed | the KL divergence is summed over the vocabulary, multiplied by \
the squared temperature, and averaged over the tokens of the loss
BMPrune.compute_mask BMPrune.set_optim_for_pruning | changed | can be called for several models
BMQuant.quantize | changed | uses integers on any device; gradients are rounded in the same way
BMMoE.get_hidden | changed | `moe_records` uses the module names of the config
save | changed | mode "quant" writes the same names; mode "prune" writes `FILE.config.json`
save_masks load_masks | changed | masks are the zeros of one model, which is an argument

# Internals
BMPrune.get_masks prune_func.m4n2_1d prune_func.m4n2_2d_greedy | gone | bmforge.compress.prune
SPruneEngine SPrunePlugin SPruneStrategy | gone | bmforge.compress.prune.structure.StructureMethod
moefication | gone | bmforge.compress.moefy
arguments.parse_args | gone | `bmforge compress`, or argparse
""")
