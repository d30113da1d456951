"""Fixtures of the library's tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """The library as users have it: its own messages, where the tests' type checks would speak first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
