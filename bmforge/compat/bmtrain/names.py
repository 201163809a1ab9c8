"""Table of BMTrain's public names (1.0 and older) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Initialization
init_distributed | changed | works with any launcher or none; uses an existing process group of \
the program
init.init_distributed init.is_initialized is_initialized rank world_size global_var.rank | same
config global_var.config | changed | read-only; its groups are torch groups; every stream is the \
current stream
global_var.world_size init.topology init.topology.get_group_id init.topology.get_group_rank | same
global_var.ConfigMap | gone | bmt.config
synchronize synchronize.synchronize | same
load_nccl_pypi utils.load_nccl_pypi | gone | nothing: torch includes its own collectives
clean | gone | nothing: process groups are destroyed at exit

# Parameters and modules
DistributedParameter | changed | an `nn.Parameter`; with several processes, a DTensor sharded by \
rows
DistributedParameter.group DistributedParameter.gather | same
DistributedParameter.gather_all | same
DistributedParameter.tp_gather | changed | an alias of `gather_all`
ParameterInitializer init_parameters grouped_parameters | same
param_init.init_parameters param_init.grouped_parameters | same
param_init.init_distributed_parameter | gone | bmt.init_parameters(module)
param_init.iterate_parameters | gone | module.parameters()
DistributedModule layer.DistributedModule | changed | gathers its parameters once per call
BMTrainModelWrapper | changed | modifies the model in place; tied parameters stay tied; every \
repeated block becomes a `Block`; a model on the meta device gets uninitialized shards, which \
`load` fills
wrapper.make_distributed wrapper.model_wrapper_dispatch | gone | bmt.BMTrainModelWrapper(model)

# Blocks
Block CheckpointBlock block_layer.Block | changed | applies `fully_shard` to the module and \
`torch.utils.checkpoint` inside; blocks of one model prefetch each other
Block.state_dict Block.named_modules Block.named_children Block.train Block.eval | same
Block.set_pre_module Block.pre_module Block.next_module Block.release_next_module | gone | \
nothing: the order is recorded in the first step
Block.release Block.init_param_storage Block.reference Block.pre_hook Block.post_hook | gone | \
nothing: torch's fully_shard manages the storage
Block.grouped_parameters Block.init_parameters | gone | bmt.grouped_parameters(block), \
bmt.init_parameters(block)
block_layer.storage_type_cuda | gone | nothing: torch's fully_shard manages the storage
CheckpointBlockContext block_layer.CheckpointBlockContext | gone | bmt.Block as a module
checkpoint | gone | bmt.CheckpointBlock, or torch.utils.checkpoint
TransformerBlockList block_layer.TransformerBlockList | same
PipelineTransformerBlockList pipe_layer.PipelineTransformerBlockList | changed | uses the \
engine's GPipe schedule and messages; supports several hidden values and ZeRO-2 or 3
PipelineTransformerBlockList.get_range_by_stage_id | same
PipelineTransformerBlockList.get_part_len_by_stage_id | same
PipelineTransformerBlockList.get_stage_by_layer_id | same
pipe_layer.PipePreFunction pipe_layer.PipePostFunction pipe_layer.StagePreFunction \
pipe_layer.StagePostFunction | gone | bmt.PipelineTransformerBlockList as a module
PipeDreamBlockList | gone | bmt.PipelineTransformerBlockList, or bmforge.parallel.Layout(pp=...)
zero_context hook_func | gone | bmt.Block, whose parameters torch's fully_shard gathers
zero_context.ZeroContext zero_context.ZeroContext.enter zero_context.ZeroContext.exit | gone | \
bmt.Block
hook_func.zero_pre_forward hook_func.zero_post_forward | gone | bmt.Block
hook_func.zero_pre_backward hook_func.zero_post_backward hook_func.OneStepNoGradFunc \
hook_func.PreHookFunc hook_func.PostHookFunc | gone | bmt.Block

# Saving and loading
save load store.save store.load | changed | one file of plain tensors, loaded with \
`weights_only`; `non_blocking` writes in the background
store.allgather_objects store.allgather_object store.broadcast_object | same
store._save_to_rank0 store._save_to_local_rank0 | same
store._save_to_infer_model | changed | the parts are on the host
store.async_save_to_file | gone | bmt.save(model, file, non_blocking=True)
store.DistributedTensorWrapper store.DistributedTensorWrapper.broadcast \
store.DistributedTensorWrapper.copy | gone | bmt.load
store.DistributedStateDictWrapper store.DistributedStateDictWrapper.copy \
store.DistributedStateDictWrapper.keys | gone | bmt.load

# Optimizers and learning rates
optim.AdamOptimizer optim.AdamOptimizer.step optim.AdamOptimizer.load_state_dict | changed | \
torch's AdamW on fp32 master weights
optim.AdamOptimizer.zero_grad | same
optim.AdamOptimizer.get_avg_delta optim.AdamOptimizer.get_var_delta | gone | the methods of \
AdamOffloadOptimizer(..., record_delta=True)
optim.AdamOffloadOptimizer | changed | states are on the host; the engine copies gradients and \
weights during the steps
optim.AdamOffloadOptimizer.step optim.AdamOffloadOptimizer.zero_grad | same
optim.AdamOffloadOptimizer.get_avg_delta optim.AdamOffloadOptimizer.get_var_delta | same
optim.AdamOffloadOptimizer.state_dict optim.AdamOffloadOptimizer.load_state_dict | same
optim.OptimManager optim.OptimManager.scale_loss optim.OptimManager.backward | same
optim.OptimManager.add_optimizer optim.OptimManager.zero_grad optim.OptimManager.step | same
optim.OptimManager.clip_grad_norm | changed | parameters shared by several processes count once
optim.OptimManager.state_dict optim.OptimManager.load_state_dict | changed | supports any \
optimizer; includes the number of steps since the loss scale last changed
optim.optim_manager.check_overflow optim.optim_manager.grad_rescale | same
optim.clip_grad_norm optim_step | same
optim._distributed optim._distributed.state_dict_gather | gone | optimizer.state_dict(gather=True)
optim._function optim._function.adam_cpu optim._function.adam_fp16 optim._function.adam_bf16 \
optim._function.fp16_from_fp32 optim._function.bf16_from_fp32 | gone | bmt.optim.AdamOptimizer
lr_scheduler.WarmupLRScheduler lr_scheduler.WarmupLRScheduler.get_lr | same
lr_scheduler.WarmupLRScheduler.get_lr_warmup lr_scheduler.WarmupLRScheduler.get_lr_decay | same
lr_scheduler.WarmupLRScheduler.current_lr lr_scheduler.WarmupLRScheduler.step | same
lr_scheduler.WarmupLRScheduler.state_dict lr_scheduler.WarmupLRScheduler.load_state_dict | same
lr_scheduler.NoDecay lr_scheduler.Linear lr_scheduler.Exponential lr_scheduler.Noam | same
lr_scheduler.Cosine | changed | stays at 0 after `end_iter`

# Losses and layers
loss.FusedCrossEntropy | changed | `F.cross_entropy` in fp32; `parallel=True` for a sharded \
vocabulary
loss.OpFusedCrossEntropy loss.VPFusedCrossEntropy | gone | bmt.loss.FusedCrossEntropy
loss._function | gone | torch.isfinite, or bmt.loss.FusedCrossEntropy
loss._function.has_inf_nan | gone | torch.isfinite
loss._function.cross_entropy_forward loss._function.cross_entropy_backward_inplace \
loss._function.fused_sumexp loss._function.fused_softmax_inplace | gone | \
bmt.loss.FusedCrossEntropy
nn.Linear nn.OpLinear nn.ReduceType | same
nn.ColumnParallelLinear nn.RowParallelLinear | same
nn.VPEmbedding nn.OpParallelLinear | same
nn.Projection nn.VPProjection | same
nn.preprocess_input nn.async_all_gather_linear_func nn.async_reduce_scatter_linear_func \
nn.async_all_gather_linear_backward_func | gone | bmt.nn.OpParallelLinear

# Communication
distributed.all_gather distributed.all_reduce | changed | different gradients, see below
distributed.reduce_scatter distributed.broadcast | changed | different gradients, see below
distributed.send_activations distributed.recv_activations | same
distributed.send_meta distributed.recv_meta | gone | bmt.distributed.send_activations and \
recv_activations, which also send shape and dtype
distributed.OpBroadcast distributed.OpAllGather distributed.OpReduceScatter \
distributed.OpAllReduce | gone | the functions of bmt.distributed
parameter.OpAllGather | gone | parameter.gather()
nccl nccl.NCCLCommunicator | changed | based on torch.distributed, on any device
nccl.commCount nccl.commRank nccl.allReduce nccl.allGather nccl.reduceScatter nccl.broadcast | same
nccl.reduce nccl.send nccl.recv nccl.groupStart nccl.groupEnd | same
nccl.getUniqueId nccl.commInitRank | gone | torch.distributed.new_group
nccl.commDestroy | gone | torch.distributed.destroy_process_group(group)
nccl.dtype2nccl nccl.op2nccl nccl.NCCLCommunicator.ptr | gone | torch's dtypes, "sum" and groups
sum_loss gather_result wait_loader | same
synchronize.sum_loss synchronize.gather_result synchronize.wait_loader | same

# Inspecting and printing
inspect.inspect_model inspect.inspect_tensor inspect.record_tensor inspect.format_summary | same
inspect.InspectTensor inspect.InspectTensor.get_summary inspect.InspectTensor.get_tensor | same
inspect.inspect_block inspect.inspect_pipeline_transformer_block_list | gone | \
bmt.inspect.inspect_model
inspect.InspectTensorManager | gone | bmt.inspect.inspect_tensor
inspect.align_str inspect.format_line inspect.item_formater | gone | bmt.inspect.format_summary
debug.clear debug.set debug.get debug.append debug.extend | same
print_rank print_dict print_block utils.print_rank utils.print_dict utils.print_block | same
see_memory utils.see_memory | changed | also prints the host's memory
utils.AverageRecorder utils.AverageRecorder.record utils.AverageRecorder.value | same
utils.round_up utils.tp_split_tensor utils.check_torch_version | same
print_rank_pp | gone | bmt.print_rank(..., rank=n)
benchmark benchmark.all_gather benchmark.reduce_scatter benchmark.send_recv | changed | reports \
the best of three runs; sizes can be passed
benchmark.format_size benchmark.format_size_ | gone | your own formatting
""")
