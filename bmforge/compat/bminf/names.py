"""Table of BMInf's public names (2.0 and 1.0) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# BMInf 2
wrapper | changed | one limit covers the whole model, including buffers and all lists of blocks; \
nested lists, different blocks and transformers' Conv1D are supported; runs on a CPU as well
TransformerBlockList | changed | blocks may differ; gradients follow torch's grad mode, also \
during iteration; without a second argument no block is moved
QuantizedLinear | changed | packed for the kernels; any number of tokens; the gradient is \
computed with the dequantised weights, in fp32
QuantizedLinear.weight_quant QuantizedLinear.weight_scale | changed | computed when they are \
read; scales in fp32
quantization scheduler kernels core | gone | bminf.QuantizedLinear and bminf.TransformerBlockList
OpLinear | gone | bminf.QuantizedLinear as a module
calc_fixed_layers | gone | bmforge.memory.resident.spread_resident
DeviceLayerScheduler DeviceLayerScheduler.forward OpDeviceLayer SchedLayerInfo ParameterInfo \
pin_layer transfer_layers swap_params | gone | bmforge.memory.streaming.stream_blocks_
gemm_calc_scale gemm_round gemm_scale gemm_scale_round Kernel | gone | \
bmforge.nn.products.multiply_packed

# Models of BMInf 1
models.CPM1 models.CPM2 models.EVA | changed | `version` is a directory or hub id; the sum of \
`memory_limit` and `dynamic_memory` is the engine's budget
models.CPM1.generate | changed | ends at the model's last position; padding is not counted as \
generated
models.CPM2.generate | same
models.CPM2.fill_blank | changed | every blank is filled; `max_tokens` is the limit of one blank
models.EVA.dialogue | changed | older utterances that do not fit are removed as a whole
CPM1.free CPM2.free EVA.free | gone | nothing: the memory of a request is freed with it
models.cpm1 models.cpm2 models.eva | gone | bminf.models.CPM1, CPM2 and EVA
CPM1Configuration CPM2Configuration EVAConfiguration GPTConfiguration T5Configuration | gone | \
CPM1Config, CPM2Config and EVAConfig of bmforge.models
data | gone | a directory as version=
data.set_source data.get_source data.set_cache_path data.get_cache_path data.ensure_file | gone | \
a directory as version=

# Differentiable models of BMInf 1
torch.CPM1 torch.CPM2 | changed | outputs and arguments are those of the models of `bmforge.models`
torch.CPM1.tokenizer torch.CPM1.get_input_embeddings | changed | those of the bmforge model
torch.CPM1.encode torch.CPM1.project torch.CPM1.embedding torch.CPM2.decode | gone | the model as \
a module
torch.models torch.arch torch.utils torch.allocator | gone | bminf.torch.CPM1 and CPM2
TorchGPT2 TorchT5 TorchGPTTokenizer TorchT5Tokenizer ResultClass | gone | bminf.torch.CPM1 and CPM2
OpGPTProjection OpGPTEncode OpT5Projection OpT5Encode OpT5Decode | gone | bminf.torch.CPM1 and CPM2
TorchGPTTokenizer.eos_token TorchGPTTokenizer.eos_token_id TorchGPTTokenizer.pad_token_id \
TorchGPTTokenizer.num_special_tokens_to_add TorchGPTTokenizer.get_special_tokens_mask \
TorchGPTTokenizer.build_inputs_with_special_tokens \
TorchGPTTokenizer.additional_special_tokens_ids TorchGPTTokenizer.convert_tokens_to_string \
TorchT5Tokenizer.sod_token_id | gone | the tokenizers of bmforge.tokenizers
TorchAllocator torch_to_dtype torch_to_tensor wait_stream clone_tensor align_mask | gone | \
torch's own tensors

# Internals of BMInf 1
arch layers utils | gone | bmforge.models, bmforge.nn and bmforge.infer
GPT2Model GPT2Model.allocate_decode_buffer GPT2Model.embedding_step GPT2Model.projection \
GPT2Model.step GPT2Model.projection_step GPT2Model.encode_requires_grad GPT2Model.encode_backward \
GPT2Model.projection_backward T5Model T5Model.decode_step T5Model.decode_requires_grad \
T5Model.decode_backward | gone | CPM1, CPM2 and EVA of bmforge.models
WordpieceTokenizer Q2B read_vocab GPT2Tokenizer GPT2Tokenizer.vocab_size GPT2Tokenizer.eod_id \
GPT2Tokenizer.pad_id GPT2Tokenizer.unk_id GPT2Tokenizer.eod_token GPT2Tokenizer.pad_token \
GPT2Tokenizer.unk_token GPT2Tokenizer.start_of_word GPT2Tokenizer.tokenize \
GPT2Tokenizer.convert_tokens_to_ids GPT2Tokenizer.convert_ids_to_tokens T5Tokenizer \
T5Tokenizer.sod_token T5Tokenizer.sod_id T5Tokenizer.get_span | gone | CPM1Tokenizer, \
CPM2Tokenizer and EVATokenizer of bmforge.tokenizers
LayerScheduler LayerScheduler.load LayerScheduler.release LayerScheduler.loop_layers LayerList | \
gone | bmforge.memory.streaming.stream_blocks_
Allocator Allocator.allocate Allocator.memory_stats Allocator.free_all CUDAAllocator \
SizeLimitedAllocator move_memory Context Context.current_stream Device Device.idx Device.current \
Device.free_memory Device.total_memory Device.create_event Device.create_stream \
Device.destroy_event Device.destroy_stream Memory | gone | bmforge.infer.Engine and its budget
load_dtype load_string load_tuple load_parameter dump_dtype dump_string dump_tuple dump_parameter \
Layer Layer.dump Layer.nbytes Layer.init_data Model Parameter Parameter.value Parameter.data \
Parameter.put_data Tensor Tensor.device_id Tensor.dtype Tensor.copy_ Tensor.ptr Tensor.shape \
Tensor.reshape Tensor.from_numpy Tensor.zero_ Tensor.numpy | gone | torch's own modules and \
tensors
Attention Attention.init_kv Embedding Embedding.embedding_forward Embedding.projection_forward \
FeedForward Layernorm Linear OutputLogits PositionEmbedding EncoderBlock DecoderBlock \
DecoderBlockWithCrossAttention | gone | bmforge.nn
GenerateSampler GenerateSampler.sample | gone | bmforge.infer.generate
round_up get_traceback | gone | nothing
""")
