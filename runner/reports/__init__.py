"""What hvdrun shows beside a job, or instead of one."""
