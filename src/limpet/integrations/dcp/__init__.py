"""``torch.distributed.checkpoint`` (DCP) on top of this engine.

Pass a ``StorageWriter`` or ``StorageReader`` to DCP. It then writes ordinary snapshots and loads
them with all digests checked. DCP makes the plans, gathers them, and reports errors; this package
converts its plans to boxes. See ``docs/dcp.md``.

Terms: an *FQN* (fully qualified name) is DCP's name of a leaf, such as ``model.fc.weight``.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, and ``run``.
"""

from __future__ import annotations

from limpet.integrations.dcp.reading import StorageReader
from limpet.integrations.dcp.writing import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
