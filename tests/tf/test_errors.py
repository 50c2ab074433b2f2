"""Errors of collectives: of hvdlite's class, and of the class in `tf.errors` that Horovod raises; eagerly and in graphs."""

from __future__ import annotations

from tests.tf.support import run


def test_errors_are_of_hvdlites_and_of_tensorflows_class() -> None:
    run(2, "errors:errors_are_of_hvdlites_and_of_tensorflows_class")
