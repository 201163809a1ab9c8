"""Table of OpenPrompt's public names (1.0.1) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Models and loader
PromptModel PromptForClassification | changed | support models of bmforge and of transformers; \
text after a causal model's mask raises an error
PromptForGeneration | changed | generates a whole batch at once; `max_length` counts new tokens
PromptDataLoader | changed | examples are tokenized batch by batch; "head" truncates the start
PromptForClassification.parallelize PromptForClassification.deparallelize | gone | \
bmforge.parallel.parallelize
PromptModel.prepare_model_inputs PromptForClassification.extract_at_mask | gone | \
bmforge.tune.prompt.call.ask_model

# plms
plms.load_plm | changed | `model_path` is a directory or hub id; no tokens are added to the \
vocabulary
plms.MLMTokenizerWrapper plms.LMTokenizerWrapper plms.T5TokenizerWrapper \
plms.T5LMTokenizerWrapper plms.CPM2TokenizerWrapper | changed | define the prompt format of a \
model; padding is added when a batch is collated
plms.load_plm_from_config plms.add_special_tokens plms.get_model_class | gone | plms.load_plm

# data_utils
data_utils.InputExample data_utils.InputFeatures | changed | never unpickled
data_utils.FewShotSampler data_utils.data_sampler.FewShotSampler | same
data_utils.DataProcessor data_utils.load_dataset | same
data_utils.PROCESSORS | changed | `super_glue.*` reads directories of `save_to_disk`; COPA's \
mirrored labels, WSC's training split and ReCoRD are corrected; ChnSentiCorp is the only dataset \
of `ZH`

# prompts
prompts.ManualTemplate prompts.PTRTemplate | same
prompts.MixedTemplate | changed | a later template of the same model replaces its soft tokens
prompts.SoftTemplate | changed | its rows are initialized with the standard deviation of the \
token embeddings
prompts.PtuningTemplate | changed | `bmforge.tune.prompt.fold_rows_` replaces the prompt encoder \
by its output rows
prompts.PrefixTuningTemplate prompts.prefix_tuning_template.PrefixTuningTemplate | changed | \
supports every family, and every attention layer over tokens
prompts.ManualVerbalizer prompts.KnowledgeableVerbalizer prompts.One2oneVerbalizer | changed | it \
is an error if calibration removes all words of a class, or if two classes share a word; \
`multi_token_handler` may be "joint"
prompts.AutomaticVerbalizer | changed | uses a single search
prompts.SoftVerbalizer prompts.GenerationVerbalizer | same
prompts.ProtoVerbalizer | changed | its prototypes are stored in `core`
prompts.PTRVerbalizer | changed | the same rule with and without labels
prompts.load_template prompts.load_verbalizer prompts.load_template_generator \
prompts.load_verbalizer_generator | gone | the classes directly
prompts.prompt_generator.LMBFFTemplateGenerationTemplate \
prompts.prompt_generator.T5TemplateGenerator prompts.prompt_generator.RobertaVerbalizerGenerator \
| changed | generated templates are strings; two masks

# utils and runners
utils.calibrate.calibrate utils.reproduciblity.set_seed utils.set_seed | same
trainer.ClassificationRunner trainer.GenerationRunner | changed | no TensorBoard; checkpoints \
contain only the weights
LMBFFClassificationRunner ProtoVerbClassificationRunner | gone | `bmforge train prompt-classify`
config default_config prompt_base lm_bff_trainer protoverb_trainer | gone | `bmforge train \
prompt-classify`
utils.metrics.classification_metrics utils.crossfit_metrics.evaluate | changed | without ROUGE-L, \
correlations and loose precision
utils.metrics.generation_metric | changed | words are split by a regular expression, not by NLTK
utils.logging utils.cuda utils.custom_tqdm utils.utils | gone | bmforge.logging and \
bmforge.data.tasks.metrics
""")
