"""The parts of `finetune.py`: pictures and texts (`data`), checkpoints (`folder`), the chart of the loss (`curve`)."""
