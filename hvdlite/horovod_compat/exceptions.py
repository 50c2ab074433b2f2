"""`horovod.common.exceptions`."""

from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "get_version_mismatch_message"]


class HorovodVersionMismatchError(ImportError):
    """Never raised: hvdlite is not built against a framework. Here for scripts that catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return Horovod's words for a framework that is not the one it was built with."""
    return f"built with {name} {version}, but {installed_version} is installed"
