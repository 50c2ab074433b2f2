"""For all tests of the torch frontend."""

from tests.torch import invariants

invariants.watch()
