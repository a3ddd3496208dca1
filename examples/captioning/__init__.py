"""What `batch_caption.py` is made of, in the order of the work.

`places` (names of files), `sources` (what there is to caption), `pictures` (decoding), `batches` (costs, spread,
batches), `plan` (what a run is, and has to do), `captioner` (the model), `journal` (records on disk), `progress`
(counts over all processes), `worker` (all of them at work), `exports` (merged records as files that people load).
"""
