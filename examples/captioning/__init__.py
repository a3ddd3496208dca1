"""What `batch_caption.py` is made of, in the order of the work.

`sources` (what there is to caption), `pictures` (decoding), `batches` (costs, spread, batches), `captioner` (the
model), `journal` (records on disk: resume, merge, manifest), `progress` (counts over all processes), `worker` (all of
them at work).
"""
