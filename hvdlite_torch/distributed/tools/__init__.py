"""What torch's tools see of process groups: its profiler, compiler, debugging modes and flight recorder, and step counts."""
