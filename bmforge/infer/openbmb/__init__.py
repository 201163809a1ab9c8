"""Generation in the forms of OpenBMB's models: conversations (EVA) and documents (CPM-Bee)."""
