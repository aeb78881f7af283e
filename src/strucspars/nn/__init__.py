"""PyTorch meets the core: tensors in, arrays and plans out."""
