"""The captioner for large runs: `main.py` runs it in one process, or in many of accelerate."""
