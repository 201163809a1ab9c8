"""Table of BMCook's public names and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# BMCook
ConfigParser | changed | unknown and contradicting keys raise; defaults are filled in at every level
ConfigParser.load ConfigParser.get ConfigParser.save | same
CookTrainer.set_compression | changed | for any number of models, one after the other; masks are \
zeros in the weights; the projection of hidden states is trained
CookTrainer.forward | changed | for the model that it is given; the Lagrangian is in `lag_loss`
CookOutput | changed | has `lag_loss` and `moe_records` as well, whatever is done
BMDistill.set_forward | changed | the divergence is summed over the vocabulary, times the square \
of the temperature, and averaged over the tokens that count
BMPrune.compute_mask BMPrune.set_optim_for_pruning | changed | may be called for several models
BMQuant.quantize | changed | integers on any device; gradients are rounded likewise
BMMoE.get_hidden | changed | `moe_records` names modules as the config does
save | changed | mode "quant" writes the same names; mode "prune" writes `FILE.config.json`
save_masks load_masks | changed | masks are those of the zeros in one model, which is named

# Below
BMPrune.get_masks prune_func.m4n2_1d prune_func.m4n2_2d_greedy | gone | bmforge.compress.prune
SPruneEngine SPrunePlugin SPruneStrategy | gone | bmforge.compress.prune.structure.StructureMethod
moefication | gone | bmforge.compress.moefy
arguments.parse_args | gone | `bmforge compress`, or argparse
""")
