"""Read what several examples take: pictures and videos on disk, processors, prompts, batches, checkpoints.

`places` (names of files), `sources` (items of folders, shards, tables), `pictures` (decoding), `processors`, `prompts`,
`batches` (costs, shares, batches), `files` (whole files, locks), `checkpoints` (their contents).
"""
