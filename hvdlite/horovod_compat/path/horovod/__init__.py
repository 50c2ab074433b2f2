"""Found in place of Horovod when `hvdrun --horovod-compat` puts this folder on the path."""

import importlib
import sys

import hvdlite.horovod_compat  # noqa: F401

del sys.modules["horovod"]
sys.modules["horovod"] = importlib.import_module("horovod")
