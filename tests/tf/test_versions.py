"""Versions of TensorFlow and Keras that would train something else are refused; what is imported."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from hvdlite_tf.versions import OLDEST, OLDEST_JAX, check_installed


@pytest.mark.parametrize("installed", [{}, {"keras": "3.8.0"}, {"keras": "3.15.1", "tensorflow": "2.16.2"},
                                       {"tensorflow-cpu": "2.21.0", "keras": "4.0.dev0"}])
def test_versions_that_work(installed: dict[str, str]) -> None:
    check_installed(lambda name: _version_of(installed, name))


@pytest.mark.parametrize(("name", "version"), [("keras", "3.7.0"), ("keras", "2.15.0"), ("tensorflow", "2.15.1"),
                                               ("tensorflow-cpu", "2.9")])
def test_older_versions_are_refused_with_both_versions(name: str, version: str) -> None:
    oldest = ".".join(map(str, OLDEST[name]))
    with pytest.raises(ImportError, match=f"needs {name} {oldest} or newer, and {version} is installed"):
        check_installed(lambda asked: _version_of({name: version}, asked))


def test_an_older_jax_is_refused_on_the_jax_backend() -> None:
    for version in ("0.4.36", "0.5.0", "1.0"):
        check_installed(lambda name, version=version: version, OLDEST_JAX)
    with pytest.raises(ImportError, match=r"needs jax 0\.4\.36 or newer, and 0\.4\.35 is installed: pip install -U jax"):
        check_installed(lambda name: "0.4.35", OLDEST_JAX)


def test_other_backends_do_not_import_tensorflow() -> None:
    script = "import sys, hvdlite_tf.keras; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "KERAS_BACKEND": "jax"}).returncode == 0


def _version_of(installed: dict[str, str], name: str) -> str:
    if name not in installed:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]
