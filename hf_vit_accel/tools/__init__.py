"""The command line: `hf-vit-accel doctor` and `hf-vit-accel bench`."""
