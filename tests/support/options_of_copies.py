"""An option of a copied tower, which may be changed in place."""

scale = 1.0
