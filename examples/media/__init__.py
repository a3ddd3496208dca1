"""Read the inputs of several examples: pictures and videos on disk, processors, prompts, batches, checkpoints.

- `places`: names of files
- `sources`, `items` and `tables`: items of folders, shards and tables, and their bytes
- `pictures`: decoding
- `processors` and `prompts`: sizes of pictures, fields of prompts
- `batches`: costs, shares and batches
- `files`: whole files, locks, messages
- `checkpoints`: checksums of models
- `launchers`: the end of a launcher
"""
