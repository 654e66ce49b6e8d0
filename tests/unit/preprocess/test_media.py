"""MediaStore: one bound over uploads and downloads, nothing left behind, only the right request gets its bytes."""

from __future__ import annotations

import pytest

from triptych.services.preprocess.media import MediaBuffer, MediaStore
from triptych.shared.errors import BadRequest, InstanceLost, Overloaded
from triptych.shared.messages import RequestId

R1, R2 = RequestId("r1"), RequestId("r2")


def _filled(store: MediaStore, data: bytes) -> MediaBuffer:
    buffer = MediaBuffer(store)
    buffer.append(data)
    return buffer


def test_keep_and_take() -> None:
    store = MediaStore(100, 50, expiry_s=10)
    media_id = store.keep(_filled(store, b"abc"), R1)
    assert (store.num_bytes, store.num_kept) == (3, 1)
    with store.take(media_id, R1) as buffer:
        assert bytes(buffer.data) == b"abc"
        assert (store.num_bytes, store.num_kept) == (3, 0)
    assert store.num_bytes == 0


@pytest.mark.parametrize("request_id", [R1, R2])
def test_unknown_or_foreign_media_is_lost(request_id: RequestId) -> None:
    store = MediaStore(100, 50, expiry_s=10)
    media_id = store.keep(_filled(store, b"abc"), R1)
    with pytest.raises(InstanceLost) as caught:
        store.take(media_id if request_id == R2 else "nothing", request_id)
    assert caught.value.code == "media_lost"
    assert store.num_kept == 1


def test_item_bound() -> None:
    store = MediaStore(100, 4, expiry_s=10)
    with MediaBuffer(store) as buffer:
        buffer.append(b"abcd")
        with pytest.raises(BadRequest) as caught:
            buffer.append(b"e")
        assert caught.value.status == 413
    assert store.num_bytes == 0


def test_store_bound_refuses_and_recovers() -> None:
    store = MediaStore(6, 4, expiry_s=10)
    first, second = _filled(store, b"abcd"), MediaBuffer(store)
    with pytest.raises(Overloaded):
        second.append(b"efg")
    second.append(b"ef")
    first.close()
    first.close()
    second.append(b"gh")
    assert store.num_bytes == 4


def test_expired_uploads_make_room() -> None:
    now_s = [0.0]
    store = MediaStore(6, 6, expiry_s=10, clock=lambda: now_s[0])
    media_id = store.keep(_filled(store, b"abcdef"), R1)
    now_s[0] = 10.0
    assert store.keep(_filled(store, b"ghijkl"), R2)
    assert store.num_bytes == 6
    with pytest.raises(InstanceLost):
        store.take(media_id, R1)


def test_release_drops_only_the_requests_own() -> None:
    store = MediaStore(100, 50, expiry_s=10)
    for request_id in (R1, R1, R2):
        store.keep(_filled(store, b"abc"), request_id)
    store.release_request(R1)
    store.release_request(R1)
    assert (store.num_bytes, store.num_kept) == (3, 1)
