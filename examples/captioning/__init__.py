"""What `batch_caption.py` and `caption_on_ray.py` are made of, in the order of the work.

`options` (command lines), `places` (names of files), `sources` (what there is to caption), `pictures` (decoding),
`batches` (costs, spread, batches), `prepare` and `plan` (what a run is, and has to do), `captioner` (the model),
`records` and `journal` (on disk), `progress` (counts over all processes), `worker` (all of them at work), `stages` and
`cluster` (at work on many machines), `exports` (merged records as files that people load).
"""
