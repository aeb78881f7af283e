"""Which channels a network can lose, and which of them it keeps."""
