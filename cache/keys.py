"""Keys of cached things: digests that cannot be built by a client and that no two different inputs share.

Full 32-byte blake3 digests over length-prefixed parts. Never Python's hash(), never a client's id. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

MM_HASH_TAG = b"triptych mm_hash v1"  # changes whenever the way from file bytes to canonical pixels does
MM_HASH_BYTES = 32
NUM_CHANNELS = 3  # canonical pixels are RGB


def mm_hash(
    pixel_parts: Iterable[bytes],
    size: tuple[int, int],
    *,
    model_revision: str,
    options_key: bytes,
    tenant_salt: bytes = b"",
) -> bytes:
    """Identity of a picture as one model sees it (ours; the advisories on hashes of `tobytes()` alone are why size is in it).

    Args:
        pixel_parts: canonical RGB bytes, row by row, 3 * height * width in all, in pieces of any length.
        size: (height, width) of the canonical picture, before the model's resize.
        model_revision: `Checkpoint.revision`.
        options_key: `ImageOptions.key()`.
        tenant_salt: keeps tenants from probing each other's cache; empty when there is one.

    Raises:
        ValueError: the parts are not 3 * height * width bytes.
    """
    height, width = size
    digest = blake3()
    for part in (MM_HASH_TAG, model_revision.encode(), options_key, tenant_salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(height.to_bytes(8, "little") + width.to_bytes(8, "little"))
    num_bytes = 0
    for pixels in pixel_parts:
        num_bytes += len(pixels)
        digest.update(pixels)
    if num_bytes != height * width * NUM_CHANNELS:
        raise ValueError(f"{num_bytes} bytes are not a {height}x{width} RGB picture")
    return digest.digest(MM_HASH_BYTES)
