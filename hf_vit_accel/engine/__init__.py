"""One call on one device: its inputs, the route of its layout, the loop over the layers, and passes of a long call."""
