"""The published numbers, and what our runs are compared with."""
