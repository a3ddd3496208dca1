"""The parts of `embed_pages.py`: `pages` (reading pages in threads) and `index` (the files of embeddings)."""
