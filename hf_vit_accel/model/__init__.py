"""The whole model around the tower: positions, placeholders, one call of the tower a forward, and decoding."""
