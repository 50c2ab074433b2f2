"""Jobs that are stopped and killed at random, and go on from their checkpoints: each sample counts once in an epoch."""
