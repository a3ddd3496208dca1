"""The whole model around the tower: positions, placeholders, and one call of the tower a forward."""
