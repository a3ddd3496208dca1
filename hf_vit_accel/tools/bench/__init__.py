"""Verify a vision tower run in every way, then time it: stock, in public ways and ours, on this machine.

`towers` builds what is timed, `ways` opens stock and patched towers, `measure` compares each with fp32, `timing` times
them in turns. The command line is `hf-vit-accel bench`.
"""
