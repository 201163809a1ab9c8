"""Table of the names that CPM-Pretrain's programs import, and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Programs
pretrain training.pretrain | changed | runs the engine's Trainer with the same functions, and \
returns it. A run in --save resumes automatically; models with mpu layers train without a \
pipeline
get_args initialize_megatron | changed | read the old command line and the arguments of an \
extra_args_provider; unsupported arguments raise an error
get_timers | same
get_tokenizer | changed | returns a bmforge.tokenizers.AutoTokenizer of the directory of \
--vocab-file
print_rank_0 utils.print_rank_0 | changed | write to the log
model_provider get_batch get_batch_pipe forward_step train_valid_test_datasets_provider | gone | \
your own function, passed to pretrain; for a GPT-2 or T5 the recipe
get_tensorboard_writer get_adlr_autoresume | gone | the metrics.jsonl and tensorboard files of a run
save_checkpoint load_checkpoint | gone | bmforge.train.save_checkpoint and load_checkpoint

# Pipelines
LayerSpec TiedLayerSpec pipe.LayerSpec pipe.TiedLayerSpec pipe.LayerSpec.build | changed | layers \
are built together with the PipelineModule on every process, which then keeps those of its stage; \
a TiedLayerSpec shares its whole layer
PipelineModule pipe.PipelineModule | changed | an ordinary module for parallelize and pretrain, \
divided such that the most expensive stage is as cheap as possible; the program sets its seeds
pipe.PipeModelDataParallelTopology | same
PipelineEngine | gone | pretrain, or bmforge.train.Trainer
_megatron_batch_fn | gone | the attribute of a PipelineModule, as before
_input_grad _input_type _input_pipe_partitioned | gone | nothing: stages exchange any tensors, \
and these attributes are not read

# Models
GPT2Model GPT2ModelPipe | gone | bmforge.models.GPT2
T5Model T5ModelPipe | gone | bmforge.models.T5
BertModel | gone | bmforge.models.Bert
ParallelTransformer ParallelTransformerLayerPipe | gone | bmforge.nn.Block

# mpu
mpu.initialize_model_parallel mpu.model_parallel_is_initialized mpu.is_unitialized \
mpu.destroy_model_parallel | changed | also connects the other processes
mpu.get_data_parallel_group mpu.get_data_parallel_rank mpu.get_data_parallel_world_size \
mpu.get_model_parallel_group mpu.get_model_parallel_rank mpu.get_model_parallel_world_size \
mpu.get_model_parallel_src_rank mpu.set_model_parallel_rank mpu.set_model_parallel_world_size \
mpu.get_pipe_parallel_group mpu.get_pipe_parallel_rank mpu.get_pipe_parallel_world_size \
mpu.get_io_parallel_group mpu.get_topology | same
mpu.ColumnParallelLinear mpu.RowParallelLinear mpu.VocabParallelEmbedding | changed | weights are \
initialized in full, then sharded, on every device: they are the same on any number of processes
mpu.LayerNorm mpu.divide mpu.split_tensor_along_last_dim mpu.utils.VocabUtility | same
mpu.copy_to_model_parallel_region mpu.reduce_from_model_parallel_region \
mpu.scatter_to_model_parallel_region mpu.gather_from_model_parallel_region | same
mpu.vocab_parallel_cross_entropy | changed | does not modify the logits
mpu.broadcast_data | changed | supports any number of dimensions; missing tensors and wrong \
dtypes raise an error on all processes
mpu.clip_grad_norm | same
mpu.checkpoint mpu.get_cuda_rng_tracker mpu.model_parallel_cuda_manual_seed | changed | work on \
any device
mpu.init_checkpointed_activations_memory_buffer mpu.reset_checkpointed_activations_memory_buffer \
| gone | layout.sequence_parallel of a recipe
mpu.ParallelEmbedding mpu.BertParallelSelfAttention mpu.BertParallelTransformerLayer | gone | \
mpu.ColumnParallelLinear and mpu.RowParallelLinear, or bmforge.nn.Block; only CPM-Pretrain's \
tests name these classes, its mpu never had them

# Data
build_train_valid_test_datasets | gone | data.paths and data.split of the recipe
get_ltor_masks_and_position_ids utils.get_ltor_masks_and_position_ids | same
make_dataset make_builder | gone | bmforge.compat.model_center.tools.indexed_dataset
reduce_losses utils.reduce_losses | same
fp32_to_fp16 fp16_to_fp32 FP16_Module FP16_Optimizer | gone | train.precision
""")
