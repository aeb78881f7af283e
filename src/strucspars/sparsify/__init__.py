"""Sparse training: the penalty, the epoch's decisions, and the plan they lead to."""
