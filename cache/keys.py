"""Keys of pictures: digests that cannot be built by a client and that no two different inputs share. Pure.

Full 32-byte blake3 digests over length-prefixed parts. Never Python's hash(), never a client's id. file_key names a picture
without decoding it, mm_hash by its pixels; each commits to the model's revision and to the tenant's salt, so that nothing is
shared across either. The keys of KV blocks are in block_keys.py. No numpy: processes that decode pictures are small.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

MM_HASH_TAG = b"triptych mm_hash v1"  # changes whenever the way from file bytes to canonical pixels does
FILE_KEY_TAG = b"triptych file_key v1"
KEY_BYTES = 32
MM_HASH_BYTES = KEY_BYTES
NUM_CHANNELS = 3  # canonical pixels are RGB


def file_key(content: bytes | memoryview, *, model_revision: str, options_key: bytes, cache_salt: bytes = b"") -> bytes:
    """Identity of a media file, from which its mm_hash follows without decoding it (ours). Takes as long as reading the bytes.

    Args:
        content: the file.
        model_revision: `Checkpoint.revision`.
        options_key: `ImageOptions.key()`, with the request's own pixel limits.
        cache_salt: keeps tenants from probing each other's cache; empty when there is one.
    """
    digest = begin_digest(FILE_KEY_TAG, MM_HASH_TAG, model_revision.encode(), options_key, cache_salt)
    digest.update(content)
    return digest.digest()


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
    digest = begin_digest(MM_HASH_TAG, model_revision.encode(), options_key, tenant_salt)
    digest.update(height.to_bytes(8, "little") + width.to_bytes(8, "little"))
    num_bytes = 0
    for pixels in pixel_parts:
        num_bytes += len(pixels)
        digest.update(pixels)
    if num_bytes != height * width * NUM_CHANNELS:
        raise ValueError(f"{num_bytes} bytes are not a {height}x{width} RGB picture")
    return digest.digest()


def begin_digest(*parts: bytes) -> blake3:
    """A digest that has seen these parts, each with its length before it."""
    digest = blake3()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest
