"""What the tests of the fleet share: they run on their own, without the conftest.py of the others."""

from tests.proofs import share

share()
