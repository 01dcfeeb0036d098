"""Checks on pieces of an object that every store makes in the same words."""

from __future__ import annotations

from holdfast.errors import StoreError


class WrittenRanges:
    """The pieces of an object of ``length`` bytes that have been written.

    ``add`` is one append, so that many threads may call it.
    """

    def __init__(self, key: str, store: str, length: int) -> None:
        self._fields = {"key": key, "store": store}
        self._length = length
        self._ranges: list[tuple[int, int]] = []
        if length < 0:
            raise StoreError(f"An object of {length} bytes cannot be written", **self._fields)

    def check_bounds(self, offset: int, size: int) -> None:
        """Raises ``StoreError`` if such a piece lies outside the object."""
        if offset < 0 or offset + size > self._length:
            raise StoreError(
                f"A piece of {self._fields['key']} lies outside the object",
                expected=f"bytes within 0 to {self._length}",
                found=f"bytes {offset} to {offset + size}",
                offset=offset,
                **self._fields,
            )

    def add(self, offset: int, size: int) -> None:
        if size:
            self._ranges.append((offset, size))

    def require_complete(self) -> None:
        """Raises ``StoreError`` naming the first byte that was written never or twice."""
        end = 0
        for offset, size in [*sorted(self._ranges), (self._length, 0)]:
            if offset != end:
                twice = offset < end
                raise StoreError(
                    f"{self._fields['key']} cannot be committed",
                    expected=f"each of its {self._length} bytes written exactly once",
                    found=f"byte {min(offset, end)} written {'twice' if twice else 'never'}",
                    offset=min(offset, end),
                    **self._fields,
                )
            end = offset + size


def check_range(key: str, store: str, offset: int, length: int, capacity: int) -> None:
    """Raises ``StoreError`` for a range that no object can have, or that ``into`` cannot hold."""
    if offset < 0 or length < 0 or length > capacity:
        raise StoreError(
            f"{key} in {store} cannot be read so",
            expected=f"an offset from 0 on and at most the {capacity} bytes that there is room for",
            found=f"{length} bytes from {offset}",
            key=key,
            store=store,
            offset=offset,
        )


def short_read_error(key: str, store: str, offset: int, length: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} ends too early, read from byte {offset}",
        expected=f"{length} bytes",
        found=f"{found} bytes",
        todo="The object is cut short or is another one: use an earlier version",
        key=key,
        store=store,
        offset=offset,
    )


def too_long_error(key: str, store: str, limit: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} is longer than it may be",
        expected=f"at most {limit} bytes",
        found=f"{found} bytes",
        key=key,
        store=store,
    )
