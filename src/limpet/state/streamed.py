"""Members of a state whose arrays are read while a save runs, such as tables on servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from limpet.errors import LimpetError
from limpet.format.tree import child_keys
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.state.modules import calling
from limpet.state.walk import as_dict

Members = dict[str, "Streamed"]
"""Streamed members of a state by key, in the order that all ranks use."""


class Streamed(ABC):
    """A member at the top level of a state that keeps a cut of itself for a save, during which it
    may change, and restores itself. All ranks of a group have one under the same key, or none."""

    tables: Sequence[str] = ()  # the names of those of all ranks, for the metadata of a version

    @property
    def members(self) -> Mapping[str, Any]:
        """The other members of the state that belong to this one, such as a model on servers."""
        return {}

    def join(self, key: str, run: Any) -> Group | None:
        """Return the group in which other processes save and restore their parts of this member,
        which is ``key`` in the state of a training of ``run``, a ``Run``. None: there are none."""
        return None

    @abstractmethod
    def begin_save(self, key: str, base: Any, group: Group) -> None:
        """Begin a save under ``key``, on all ranks of the group. All that can fail is within a
        collective, if this uses one. ``base``: the ``SnapshotReader`` for references, or None."""

    @abstractmethod
    def end_staging(self) -> None:
        """The other members of the state are staged: nothing need wait for this save any longer."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the tree of the save that has begun, whose large leaves are held ``Source``s, or
        ``LocalBoxes`` of them; otherwise, only plain values. No rank compares the elements."""

    @abstractmethod
    def end_save(self, digest: str | None, error: BaseException | None) -> None:
        """End the save, in any thread, once for each ``begin_save``, also for one that raised.
        ``digest``: of the committed manifest, or None: it failed, or its outcome is unknown."""

    @abstractmethod
    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """Return what of the ``saved`` tree, with None for each leaf, does not fit: both sides as
        text (``64, live 32``) by relative key. A load may call this twice, and changes nothing."""

    @abstractmethod
    def restore(self, snapshot: Any, key: str) -> None:
        """Read what is below ``key`` from a ``SnapshotReader``, alone and checked. Raises
        ``FormatError`` for damage: a resume then restores an older version, on all ranks."""


def find_streamed(state: Any) -> Members:
    state = as_dict(state)
    if type(state) is not dict or not any(isinstance(v, Streamed) for v in state.values()):
        return {}
    keyed = zip(child_keys([*state], ""), state.values(), strict=True)
    found = dict(sorted((key, value) for key, value in keyed if isinstance(value, Streamed)))
    if len({*map(id, found.values())}) < len(found):
        raise LimpetError(f"The state has one object as {' and '.join(found)}: leave one out")
    return found


@contextmanager
def begin_members(
    members: Members, base: Any, group: Group, collective: Collective
) -> Iterator[Members]:
    """Begin the save of each member, and yield them. End it if the block raises. The ranks refer to
    the ``base`` of rank 0, or to none."""
    begun: Members = {}
    try:
        if members:
            digest = collective.broadcast("" if base is None else base.digest, str)
            base = base if base is not None and base.digest == digest else None
        for key, member in members.items():
            begun[key] = member
            with calling(member, key, "begin_save", "Nothing was saved"):
                member.begin_save(key, base, group)
        yield begun
        for member in begun.values():
            member.end_staging()
    except BaseException as e:
        end_members(begun, None, e)
        raise


def end_members(begun: Members, digest: str | None, error: BaseException | None) -> None:
    """End the save of each member once. What one raises is a note of the save's ``error``."""
    if begun:
        key, member = begun.popitem()
        try:
            with calling(member, key, "end_save", "The version is saved", committed=digest):
                member.end_save(digest, error)
        except Exception as e:
            if error is None:
                raise
            error.add_note(str(e))
        finally:
            end_members(begun, digest, error)
