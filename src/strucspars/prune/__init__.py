"""Methods that the paper compares with. So far: Network Slimming."""
