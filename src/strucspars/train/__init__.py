"""The pipeline: a recipe becomes a run folder with a trained, compressed, finetuned and evaluated network."""
