"""What a network costs: parameters and multiply-accumulates, before grouping and after."""
