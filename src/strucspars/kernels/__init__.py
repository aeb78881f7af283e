"""Convolutions with everything around them in one pass, on GPUs: several implementations, chosen by measurement."""
