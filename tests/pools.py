"""What a ``BufferPool`` holds."""

from limpet.buffers import BufferPool


def allocated_bytes(pool: BufferPool) -> int:
    return pool._count * pool.buffer_size


def free_bytes(pool: BufferPool) -> int:
    return len(pool._free) * pool.buffer_size
