"""Networks as files."""
