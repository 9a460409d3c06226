"""Codebooks shipped with the package, each a JSON file with its card beside it."""
