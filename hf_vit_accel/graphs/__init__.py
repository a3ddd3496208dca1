"""CUDA graphs of the whole encoder: `budgets` (what is replayed, and whether it pays), `buffers` (the static tensors
and how their tails are padded), `recorder` (what is CUDA's), `store` (what both runners share), `runner`, `training`.
"""
