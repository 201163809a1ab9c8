"""Table of OpenDelta's public names (0.3) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Delta models
LoraModel | changed | also has `rank`, `alpha` and `modified_keys`; applies `exclude_modules`; \
supports transformers' Conv1D and embeddings
AdapterModel | changed | applied exactly at the named module; sizes are read without a \
forward pass
LowRankAdapterModel | changed | supports any `low_rank_rank`
CompacterModel | changed | initially does not change the output
ParallelAdapterModel | changed | takes the input of the attention and adds to its output
BitFitModel | changed | biases are added and can be detached; supports norms without a bias
PrefixModel SoftPromptModel | changed | only for models of bmforge and of the ModelCenter API
delta_models.LoraModel delta_models.AdapterModel delta_models.LowRankAdapterModel \
delta_models.CompacterModel delta_models.ParallelAdapterModel delta_models.BitFitModel \
delta_models.PrefixModel delta_models.SoftPromptModel | changed | as above; all types are in one \
module
AutoDeltaModel AutoDeltaModel.from_config | same
AutoDeltaModel.from_finetuned | changed | opens directories of bmforge, PEFT and OpenDelta; no \
server
auto_delta.AutoDeltaModel auto_delta.AutoDeltaConfig | changed | as above

# Methods of delta models
DeltaBase | changed | its parameters are those of the delta
basemodel.DeltaBase | changed | as above
DeltaBase.from_config | same
DeltaBase.freeze_module | changed | can be called again; the named modules are unfrozen and saved
DeltaBase.set_active_state_dict | changed | a hook, which copies of the module keep; can be \
called again
DeltaBase.log | same
DeltaBase.attach | changed | works for every type, in any order
DeltaBase.detach | changed | works for every type, in any order
DeltaBase.save_finetuned | changed | writes PEFT's two files, OpenDelta's `config.json` and a \
model card; never a pickle
DeltaBase.from_finetuned | changed | missing or unexpected tensors and a different backbone raise \
an error
DeltaBase.trainable_parameters_names DeltaBase.frozen_parameters_names | same
DeltaBase.trainable_parameters DeltaBase.num_trainable_parameters | same
DeltaBase.num_total_parameters DeltaBase.find_key DeltaBase.find_module | same
DeltaBase.create_config_from_model | changed | `config` is set from the start
DeltaBase.add_all_delta_to_backbone DeltaBase.mark_as_delta DeltaBase.update_module \
DeltaBase.replace_module DeltaBase.modify_module DeltaBase.insert_module \
DeltaBase.insert_sequential_module DeltaBase.insert_parallel_module | gone | a type of \
bmforge.tune.delta, or attach_part_ of bmforge.nn.part
DeltaBase.load_checkpoint DeltaBase.save_checkpoint | gone | save_finetuned and from_finetuned
LoraModel.new_module_like AdapterModel.new_module_like BitFitModel.add_bias_to_others \
BitFitModel.add_bias_to_modules_have_bias_or_known_type | gone | attach_part_ of bmforge.nn.part

# Configs
AutoDeltaConfig AutoDeltaConfig.from_dict | same
AutoDeltaConfig.from_finetuned | changed | reads directories only
BaseDeltaConfig delta_configs.BaseDeltaConfig | changed | fields are validated
BaseDeltaConfig.from_dict BaseDeltaConfig.to_dict BaseDeltaConfig.to_json_string | same
BaseDeltaConfig.from_finetuned BaseDeltaConfig.save_finetuned | changed | directories only
BaseDeltaConfig.get_config_dict BaseDeltaConfig.to_json_file BaseDeltaConfig.to_diff_dict \
BaseDeltaConfig.update BaseDeltaConfig.dict_torch_dtype_to_str | gone | to_dict and \
to_json_string
delta_configs.LoraConfig delta_configs.AdapterConfig delta_configs.LowRankAdapterConfig | same
delta_configs.ParallelAdapterConfig delta_configs.BitFitConfig delta_configs.PrefixConfig | same
delta_configs.CompacterConfig delta_configs.SoftPromptConfig | changed | fields that never worked \
accept only their default

# Inspecting models
Visualization visualization.Visualization | changed | originally in bigmodelvis; shows the tree \
of `bmforge tree`
Visualization.structure_graph | changed | without `common_structure`, `mapping` and `only_common`
utils.inspect.inspect_module_statistics utils.inspect.inspect_optimizer_statistics | same
inspect.inspect_module_statistics inspect.inspect_optimizer_statistics | same
inspect.num_trainable_parameters inspect.num_total_parameters inspect.num_delta_parameters | gone \
| inspect_module_statistics
utils.interactive web interactive PortApplication PortApplication.run hello submit colorfy \
expand_part dfs | gone | `bmforge tree MODEL --html page.html`

# Internals
CommonStructureMap CommonStructureMap.load CommonStructureMap.transform \
CommonStructureMap.find_sub_common_structure transform | gone | the common module names of \
bmforge.tune.delta.address
set_axis_order GlobalSetting global_setting | gone | nothing
SaveLoadMixin SaveLoadMixin.add_configs_when_saving SaveLoadMixin.compute_saving \
SaveLoadMixin.create_yml SaveLoadMixin.create_delta_center_args \
SaveLoadMixin.create_default_usage SaveLoadMixin.create_default_name DeltaCenterArguments | gone \
| DeltaBase.save_finetuned
LoraArguments | gone | delta_configs.LoraConfig
LowRankLinear LowRankLinear.reset_parameters | gone | bmforge.nn.low_rank
InterFaceMixin InterFaceMixin.count_layer InterFaceMixin.get_layer_count AdapterLayer \
AdapterLayer.instantiate AdapterLayer.post_forward BiasLayer LowRankAdapter Activations \
HyperComplexAdapterLayer ParallelAdapterLayer ParallelAdapterLayer.pre_forward PHMLinear \
PHMLinear.init_W PHMLinear.set_phm_rule PHMLinear.set_W kronecker_product \
kronecker_product_einsum_batched matvec_product glorot_normal glorot_uniform | gone | \
bmforge.nn.bottleneck
PrefixLayerT5 PrefixLayerBart PrefixLayerGPT2 PrefixLayerBert PrefixLayerRoberta \
PrefixLayerDistilBert PrefixLayerDistilBert.key_instantiate \
PrefixLayerDistilBert.value_instantiate PrefixLayerDistilBert.key_pre_forward \
PrefixLayerDistilBert.value_pre_forward PrefixLayerDistilBert.key_forward \
PrefixLayerDistilBert.value_forward ReparameterizeFunction \
ReparameterizeFunction.record_parameters ReparameterizeFunction.compatibility_check \
ReparameterizeFunction.allocate_parameter \
ReparameterizeFunction.define_reparameterization_network | gone | bmforge.nn.prefix
SoftPromptLayer | gone | bmforge.nn.prompt
is_leaf_module non_module_param superstring_in is_child_key endswith_in endswith_in_normal \
endswith_in_regex | gone | bmforge.tune.delta.address
get_values getattribute_from_module signature get_arg_names get_arg_names_inside_func fix \
decorate sequential_caller before_caller after_caller parallel_caller \
new_replicate_for_data_parallel BackendMapping BackendMapping.check_type get_device get_dtype \
move_dict_to_cuda | gone | nothing
gen_model_hash gen_parameter_hash | gone | bmforge.tune.delta.fingerprint_of
download create_hub_repo_name | gone | a directory
utils.logging get_logger get_log_levels_dict get_verbosity set_verbosity set_verbosity_info \
set_verbosity_warning set_verbosity_debug set_verbosity_error disable_default_handler \
enable_default_handler add_handler remove_handler disable_propagation enable_propagation \
enable_explicit_format reset_format warning_advice | gone | Python's logging, under "bmforge"
""")
