"""Helpers that several test files share, one file per purpose."""
