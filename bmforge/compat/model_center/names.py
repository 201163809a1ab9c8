"""Table of ModelCenter's public names (1.0 and older) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Initialization
get_args | same
arguments.get_args arguments.add_model_config_args arguments.add_training_args | same
utils.print_inspect | same
utils.check_web_and_convert_path | changed | returns a directory of that name, from the Hugging \
Face cache, or downloaded from the hub; does not use ModelCenter's server
utils.download | gone | utils.check_web_and_convert_path

# Models
model.Bert model.Roberta model.GPT2 model.GPTj model.OPT model.Llama model.T5 | changed | based \
on the models of `bmforge.models`; logits are computed when they are read
model.Longformer | changed | as above; supports any length
model.ViT model.GLM | same
model.CPM1 | changed | ModelCenter's model with relative positions, or the published model: see \
`CPM1Config`
model.CPM2 | changed | based on T5; a call with positional arguments or `enc_input` returns the \
logits, as in ModelCenter's examples
model.CPM3 | changed | the published architecture, CPM-Ant; a call with positional arguments \
returns logits and hidden states
model.BaseModel model.BaseModel.from_json_file | same
model.BaseModel.from_pretrained | changed | reads the formats of Hugging Face and ModelCenter; \
missing or unexpected weights raise an error
model.BaseModel.state_dict | changed | the names of `bmforge.models`, with the prefix `model.`
model.ModelOutput model.ModelOutput.to_tuple | changed | an index counts fields that are None
model.BaseModelOutput model.BaseModelOutputWithPooling model.Seq2SeqModelOutput | changed | an \
index counts fields that are None
BertPooler BertLMHead RobertaPooler RobertaLMHead | gone | model.pooler and model.head of a Bert \
or Roberta
LongformerPooler LongformerLMHead | gone | model.pooler and model.head of a Longformer

# Configs
model.config.Config model.config.Config.from_pretrained model.config.Config.from_json_file | same
model.config.Config.to_json_file model.config.Config.to_json_string | same
model.config.Config.to_dict | same
model.config.BertConfig model.config.RobertaConfig model.config.GPT2Config | same
model.config.GPTjConfig model.config.OPTConfig model.config.LlamaConfig | same
model.config.T5Config model.config.LongformerConfig model.config.GLMConfig | same
model.config.VitConfig | same
model.config.CPM1Config | changed | `pos_bias_type="none"` is the published CPM-1
model.config.CPM2Config | changed | encoder and decoder have the same number of layers
model.config.CPM3Config | changed | has the fields of CPM-Ant

# Layers
layer.Linear layer.Embedding layer.Embedding.projection layer.PatchEmbedding layer.Conv2d | same
layer.LayerNorm layer.FeedForward layer.Attention layer.attention.SparseSelfAttention | same
layer.SparseSelfAttention | same
layer.attention.DenseACT layer.attention.DenseGatedACT | same
layer.RelativePositionEmbedding layer.SegmentPositionEmbedding | same
layer.RotaryEmbedding layer.RotaryEmbeddingESM | same
layer.SelfAttentionBlock layer.CrossAttentionBlock layer.FFNBlock layer.TransformerBlock | same
layer.Encoder layer.Decoder | same
RotaryEmbedding.fixed_pos_embedding RotaryEmbedding.rotate_every_two | gone | the module itself
RotaryEmbedding.apply_rotary_pos_emb RotaryEmbeddingESM.rotate_half | gone | the module itself
gelu_new rms_layernorm Identity | gone | those of torch.nn

# Data
dataset.DistributedDataLoader | changed | all processes get the same number of batches, and no \
example is repeated
dataset.MMapIndexedDataset dataset.DistributedMMapIndexedDataset | changed | support `len()`
dataset.MMapIndexedDataset.sizes dataset.MMapIndexedDataset.exists | same
dataset.DistributedDataset dataset.SimpleDataset dataset.build_dataset | changed | records are \
plain values and arrays of numbers; ModelCenter's files can be read, and nothing in them is \
executed
dataset.DistributedDataset.read dataset.DistributedDataset.nbytes | same
dataset.DistributedDataset.state_dict dataset.DistributedDataset.load_state_dict | same
dataset.mask_dataset dataset.distributed_dataset.DatasetBuilder | same
dataset.distributed_dataset.DatasetWriter dataset.distributed_dataset.DatasetWriter.write | same
dataset.distributed_dataset.DatasetWriter.nblocks | same
dataset.distributed_dataset.DatasetWriter.nlines | same
dataset.distributed_dataset.DatasetWriter.close | same
dataset.shuffle_dataset | gone | bmforge.data.DataLoader, which shuffles while it reads
dataset.compact_dataset | gone | bmforge.data.store.blocks.blocks_to_store, which rewrites the \
dataset
dataset.distributed_dataset.FileInfo | gone | bmforge.data.store.blocks.BlockFile
dataset.CPM1_Dataset dataset.CPM1_Dataset_Merge dataset.CPM2_Dataset | same
dataset.cpm1.CPM1_Dataset dataset.cpm1.CPM1_Dataset_Merge dataset.cpm2.CPM2_Dataset | same
dataset.cpm1dataset.CPM1_Dataset dataset.cpm1dataset.CPM1_Dataset_Merge | same
dataset.cpm2dataset.CPM2_Dataset | same
dataset.bertdataset.DATASET dataset.gpt2dataset.DATASET dataset.llamadataset.DATASET | changed | \
supports more tasks, see "Data"
dataset.t5dataset.DATASET dataset.cpm1dataset.DATASET dataset.cpm2dataset.DATASET | changed | \
supports more tasks, see "Data"
SuperGLUE SuperGLUE.make_input SuperGLUE.make_double_input SuperGLUE.read_data | gone | \
bmforge.data.tasks.read_task
SuperGLUE.get_verbalizer | gone | DATASET[name].get_verbalizer(tokenizer)
BoolQ_Dataset CB_Dataset COPA_Dataset RTE_Dataset WiC_Dataset WSC_Dataset MultiRC_Dataset \
ReCoRD_Dataset SQuAD_Dataset LCQMC_Dataset | gone | DATASET[name]
SQuAD_Dataset.shift_tokens_right SQuAD_Dataset.generate_input | gone | DATASET["SQuAD"]

# Corpora
tools.indexed_dataset.make_builder tools.indexed_dataset.make_dataset | changed | one type of \
store for any `impl`; an existing store is not replaced
tools.indexed_dataset.get_available_dataset_impl tools.indexed_dataset.infer_dataset_impl | same
tools.indexed_dataset.dataset_exists tools.indexed_dataset.index_file_path | same
tools.indexed_dataset.data_file_path tools.indexed_dataset.MMapIndexedDataset.get | same
tools.indexed_dataset.MMapIndexedDatasetBuilder | same
tools.indexed_dataset.MMapIndexedDatasetBuilder.add_item | same
tools.indexed_dataset.MMapIndexedDatasetBuilder.end_document | same
tools.indexed_dataset.MMapIndexedDatasetBuilder.merge_file_ | same
tools.indexed_dataset.MMapIndexedDatasetBuilder.finalize | same
tools.indexed_dataset.IndexedDataset tools.indexed_dataset.IndexedCachedDataset | gone | \
tools.indexed_dataset.make_dataset
tools.indexed_dataset.IndexedDatasetBuilder | gone | tools.indexed_dataset.make_builder
IndexedDataset.read_index IndexedDataset.read_data IndexedDataset.check_index \
IndexedDataset.num_tokens IndexedDataset.size IndexedDataset.supports_prefetch \
IndexedCachedDataset.prefetch | gone | MMapIndexedDataset
tools.indexed_dataset.read_longs tools.indexed_dataset.write_longs tools.indexed_dataset.code \
tools.indexed_dataset.create_doc_idx | gone | bmforge.data.TokenStore and TokenStoreWriter
tools.preprocess_cpm1_lm.main tools.preprocess_cpm1_lm.get_args | changed | chunks are written in \
the order of the text
tools.preprocess_cpm1_lm.Encoder | gone | tools.preprocess_cpm1_lm.cut_document
tools.preprocess_cpm1_lm.Encoder.initializer | gone | tools.preprocess_cpm1_lm.cut_document

# Tokenizers
tokenizer.BertTokenizer tokenizer.RobertaTokenizer tokenizer.T5Tokenizer | same
tokenizer.GPT2Tokenizer tokenizer.GPTjTokenizer tokenizer.OPTTokenizer | same
tokenizer.LlamaTokenizer tokenizer.BaseTokenizer tokenizer.BaseTokenizer.from_pretrained | same
tokenizer.CPM1Tokenizer tokenizer.CPM2Tokenizer | changed | bmforge's tokenizers, which open the \
published vocabularies
tokenizer.CPM1Tokenizer.vocab_size tokenizer.CPM1Tokenizer.eod_id tokenizer.CPM1Tokenizer.pad_id \
tokenizer.CPM1Tokenizer.unk_id tokenizer.CPM1Tokenizer.tokenize tokenizer.CPM1Tokenizer.encode \
tokenizer.CPM1Tokenizer.decode tokenizer.CPM1Tokenizer.check \
tokenizer.CPM1Tokenizer.convert_tokens_to_ids tokenizer.CPM1Tokenizer.convert_ids_to_tokens | \
same
tokenizer.CPM2Tokenizer.sod_id tokenizer.CPM2Tokenizer.get_sentinel_num | same
tokenizer.CPM2Tokenizer.get_sentinel_id | same
tokenizer.GLMTokenizer | changed | bmforge's tokenizer
convert_to_unicode load_vocab is_contain_chinese is_contain_point WordpieceTokenizer get_pairs \
Encoder_SP Encoder_SP.convert_token_to_id Encoder_SP.convert_id_to_token Encoder.bpe get_encoder \
LlamaTokenizerBase | gone | the tokenizers

# Generation
generation.llama.LlamaBeamSearch generation.llama.LlamaRandomSampling | changed | \
`repetition_window` raises an error; `repetition_penalty` counts the generated tokens
generation.t5.T5BeamSearch generation.t5.T5RandomSampling | changed | as above
generation.llama.LlamaGeneration generation.t5.T5Generation | gone | the two other classes
LlamaGeneration.generate | gone | the method of the two other classes
pad top_k_top_p_filtering apply_repetition_penalty BeamHypotheses BeamHypotheses.add \
BeamHypotheses.is_done | gone | bmforge.infer.generate
""")
