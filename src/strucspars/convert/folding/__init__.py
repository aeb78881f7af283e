"""From a converted network to its inference graph: batch norms folded, channel shuffles absorbed."""
