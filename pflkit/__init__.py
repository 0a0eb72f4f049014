"""pflkit: personalized federated learning, right, fast and measured."""
