"""`hvdlite.ray.RayExecutor`: ranks as actors of a Ray cluster."""

from hvdlite.launch.ray import RayExecutor, Settings

__all__ = ["RayExecutor", "Settings"]
