"""Table of OpenPrompt's public names (1.0.1) and whether bmforge supports them."""

from bmforge.compat.names import read_names

__all__ = ["NAMES"]

NAMES = read_names("""
# Models, loader
PromptModel PromptForClassification | changed | over models of ours and of transformers; text \
behind a causal model's mask is refused instead of dropped in silence
PromptForGeneration | changed | a batch is written at a time; `max_length` counts new tokens
PromptDataLoader | changed | examples are tokenized batch by batch; "head" truncates the start
PromptForClassification.parallelize PromptForClassification.deparallelize | gone | \
bmforge.parallel.parallelize
PromptModel.prepare_model_inputs PromptForClassification.extract_at_mask | gone | \
bmforge.tune.prompt.call.ask_model

# plms
plms.load_plm | changed | `model_path` is a directory or hub id; nothing is added to vocabularies
plms.MLMTokenizerWrapper plms.LMTokenizerWrapper plms.T5TokenizerWrapper \
plms.T5LMTokenizerWrapper plms.CPM2TokenizerWrapper | changed | they say how a model is asked; \
nothing is padded before a batch is made
plms.load_plm_from_config plms.add_special_tokens plms.get_model_class | gone | plms.load_plm

# data_utils
data_utils.InputExample data_utils.InputFeatures | changed | nothing is unpickled
data_utils.FewShotSampler data_utils.data_sampler.FewShotSampler | same
data_utils.DataProcessor data_utils.load_dataset | same
data_utils.PROCESSORS | changed | `super_glue.*` reads what `save_to_disk` wrote; COPA's mirrored \
labels, WSC's training split and ReCoRD are right; ChnSentiCorp is the only dataset of `ZH`

# prompts
prompts.ManualTemplate prompts.PTRTemplate | same
prompts.MixedTemplate | changed | a later template of the same model replaces its soft tokens
prompts.SoftTemplate | changed | its rows are initialized with the deviation of the token embeddings
prompts.PtuningTemplate | changed | `bmforge.tune.prompt.fold_rows_` puts the rows in the place \
of what makes them
prompts.PrefixTuningTemplate prompts.prefix_tuning_template.PrefixTuningTemplate | changed | \
every family; all attentions to tokens
prompts.ManualVerbalizer prompts.KnowledgeableVerbalizer prompts.One2oneVerbalizer | changed | a \
class that calibration empties and a word of two classes are refused; `multi_token_handler` may be \
"joint"
prompts.AutomaticVerbalizer | changed | one search
prompts.SoftVerbalizer prompts.GenerationVerbalizer | same
prompts.ProtoVerbalizer | changed | its points lie in `core`
prompts.PTRVerbalizer | changed | the same rule with labels and without
prompts.load_template prompts.load_verbalizer prompts.load_template_generator \
prompts.load_verbalizer_generator | gone | the classes, called
prompts.prompt_generator.LMBFFTemplateGenerationTemplate \
prompts.prompt_generator.T5TemplateGenerator prompts.prompt_generator.RobertaVerbalizerGenerator | \
changed | generated templates are texts; two masks

# utils, runners
utils.calibrate.calibrate utils.reproduciblity.set_seed utils.set_seed | same
trainer.ClassificationRunner trainer.GenerationRunner | changed | no TensorBoard; checkpoints hold \
the weights alone
LMBFFClassificationRunner ProtoVerbClassificationRunner | gone | `bmforge train prompt-classify`
config default_config prompt_base lm_bff_trainer protoverb_trainer | gone | \
`bmforge train prompt-classify`
utils.metrics.classification_metrics utils.crossfit_metrics.evaluate | changed | ROUGE-L, \
correlations and loose precision are missing
utils.metrics.generation_metric | changed | words are split by an expression, not by NLTK
utils.logging utils.cuda utils.custom_tqdm utils.utils | gone | \
bmforge.logging and bmforge.data.tasks.metrics
""")
