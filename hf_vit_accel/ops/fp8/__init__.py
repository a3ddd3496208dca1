"""Attention in FP8: the number format, its scales, and the kernel that quantises queries, keys and values."""
