"""Generation in the formats of OpenBMB's models: conversations (EVA), documents (CPM-Bee)."""
