"""The backward of each operation, and the autograd nodes that train them."""
