"""The processes of one host."""
