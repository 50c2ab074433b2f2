"""What hvdrun writes for a job."""
