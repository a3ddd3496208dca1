"""Faults that are seeded one at a time, to see that the suite catches them."""
