"""A patched tower: its forward and state, what it holds now, the proof of its class, and how it is installed."""
