"""What the ranks of such jobs run."""
