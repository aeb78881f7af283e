"""Images and labels: where they come from, and the batches that training and evaluation see."""
