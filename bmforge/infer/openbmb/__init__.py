"""What OpenBMB's models were made for: conversations (EVA) and documents (CPM-Bee)."""
