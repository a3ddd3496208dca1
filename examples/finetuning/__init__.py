"""What `finetune.py` is made of: `data` (pictures and texts to batches), `curve` (the loss as a picture)."""
