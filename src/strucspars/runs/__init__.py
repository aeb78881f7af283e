"""A run as a folder that survives being killed at any moment."""
