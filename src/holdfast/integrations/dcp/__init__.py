"""``torch.distributed.checkpoint`` (DCP) over this engine: ``StorageWriter``, ``StorageReader``.

By one argument, whatever saves through DCP writes ordinary snapshots, and loads them checked. DCP
plans, gathers, and tells errors; its plans become boxes here. See ``docs/dcp.md``.
"""

from __future__ import annotations

from holdfast.integrations.dcp.reading import StorageReader
from holdfast.integrations.dcp.writing import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
