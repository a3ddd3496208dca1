"""Linears with LoRA adapters, computed together with the operation that they belong to."""
