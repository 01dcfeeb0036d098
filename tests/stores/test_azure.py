"""``az://`` on Azurite: the Store contract, faults on the way, a whole training, and mistakes."""

import uuid

import pytest

import holdfast
from holdfast.testing import StoreContract
from holdfast.types import MIB


@pytest.fixture
def az(azurite, monkeypatch):
    """The URL of a new container of Azurite, which the environment variables point to."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    container = f"c-{uuid.uuid4()}"
    azurite.create_container(container)
    return f"az://{container}"


class TestAzurite(StoreContract):
    partials_are_listed = False

    @pytest.fixture
    def store(self, az):
        return holdfast.open_store(f"{az}/a/folder", part_size=5 * MIB)
