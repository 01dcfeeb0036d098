"""A store of the user, and functions that use the store of the snapshot that they get."""

from pathlib import Path

from limpet.errors import Denied
from limpet.storage.local.store import LocalStore

SECRET = "hUnTeR2-sEcReT"


class TokenStore(LocalStore):
    """A local store that refuses to read without its token."""

    def __init__(self, root, token):
        super().__init__(root)
        self.token = token

    def get(self, key, limit):
        if self.token != SECRET:
            raise Denied("no token")
        return super().get(key, limit)


def setup(snapshot):
    return snapshot.load()["n"]


def evaluate(model, batch):
    process = Path("/proc/self")
    shown = process.joinpath("cmdline").read_text() + process.joinpath("environ").read_text()
    return {"n": (model * len(batch), len(batch)), "shown": (int(SECRET in shown), 1)}


def data():
    return [*range(10)]
