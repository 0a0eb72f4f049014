"""pflkit: personalized federated learning in PyTorch, right, fast and measured. The README shows how to begin."""
