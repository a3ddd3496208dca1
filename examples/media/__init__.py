"""Read the inputs of several examples: pictures and videos on disk, processors, prompts, batches, checkpoints.

`places` (names of files), `sources` (items of folders, shards and tables), `pictures` (decoding), `processors`,
`prompts`, `batches` (costs, shares, batches), `files` (whole files, locks, messages), `checkpoints` (their contents).
"""
