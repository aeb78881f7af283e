"""From a plan to a smaller network: real group convolutions, or masked dense ones of the same function."""
