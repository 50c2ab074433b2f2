"""Other hosts, and how they are reached."""
