"""``torch.distributed.checkpoint`` (DCP) on top of this engine.

Pass a ``StorageWriter`` or ``StorageReader`` to DCP. It then writes ordinary snapshots and loads
them with all digests checked. DCP makes the plans, gathers them, and reports errors; its plans become
boxes here. See ``docs/dcp.md``.
May import: ``engine``, ``storage``, ``format``, and the root modules.
"""

from __future__ import annotations

from holdfast.integrations.dcp.reading import StorageReader
from holdfast.integrations.dcp.writing import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
