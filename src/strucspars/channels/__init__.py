"""The graph of channels: what operations do to them, and which tensors must store them in one order."""
