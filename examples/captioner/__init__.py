"""The captioner for large runs: `main.py` runs it in processes of accelerate, `on_ray.py` on a cluster."""
