"""Sparse training inside other people's training programs. Each integration needs its own extra to be installed."""
