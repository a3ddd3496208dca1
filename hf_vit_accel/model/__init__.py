"""The whole model around the tower."""
