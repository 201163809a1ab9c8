"""Parameter-efficient tuning: adapters (`delta/`), and prompts with label words (`prompt/`)."""
