"""The parts of `captioner/main.py` and `captioner/on_ray.py`, in the order of the work.

- `options`: command lines
- `prepare` and `plan`: what a run has to do
- `captioner`: the model
- `records` and `journal`: records on disk
- `progress`: counts of all processes
- `worker`: one process at work
- `stages` and `cluster`: many machines at work
- `exports`: merged records as files that people load
- `messages`: how a run begins and ends

`media` holds the parts that other examples need, too.
"""
