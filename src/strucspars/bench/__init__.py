"""Inference speed: dense against compressed networks, in stock runtimes."""
