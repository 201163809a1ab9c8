"""Parameter-efficient tuning: adapters (`delta/`), and templates with label words (`prompt/`)."""
