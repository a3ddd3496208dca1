"""One call on one device: its inputs, the route of its layout, and the loop over the layers."""
