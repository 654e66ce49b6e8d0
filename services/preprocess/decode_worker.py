"""A process that decodes pictures for decode_pool.py: `python -m ... decode_worker SOCKET_FD PARENT_PID MEMORY_BYTES`.

What crashes a decoder, or makes it run or grow without end, ends only this process. Each job comes with a memfd that holds
the file; the pixels go back in it. Imports neither torch nor numpy: 16 MB, and started again in 0.1 s (measured).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
import warnings

import msgspec
from PIL import Image

from triptych.services.preprocess.decode import DecodeOptions, decode_image, strips
from triptych.shared.errors import BadRequest, TriptychError, WireError
from triptych.shared.image_info import ImageInfo

MAX_MESSAGE_BYTES = 1 << 16  # chosen: a job and an answer take under 1 KB
MEMORY_TEXT = "the image takes too much memory to decode: send a smaller one"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class DecodeJob(msgspec.Struct, frozen=True):
    """Decode what is in the memfd that comes along, within cpu_s of CPU time (whole seconds count)."""

    options: DecodeOptions
    param: str
    cpu_s: float


class DecodeAnswer(msgspec.Struct, frozen=True):
    """Either: info, with uint8 pixels [height, width, 3] in the memfd now; or why not."""

    info: ImageInfo | None = None
    error: WireError | None = None


def serve(jobs: socket.socket) -> None:
    """Answer jobs until the other side closes."""
    decoder = msgspec.msgpack.Decoder(DecodeJob)
    while True:
        payload, descriptors, _, _ = socket.recv_fds(jobs, MAX_MESSAGE_BYTES, 1)
        if not payload:
            return
        [descriptor] = descriptors
        try:
            answer = _answer(decoder.decode(payload), descriptor)
        finally:
            os.close(descriptor)
        jobs.send(msgspec.msgpack.encode(answer))


def _answer(job: DecodeJob, descriptor: int) -> DecodeAnswer:
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + job.cpu_s))  # the kernel ends us with SIGXCPU then
    # Pillow itself refuses what is over twice this, where opening costs memory already; decode_image's check comes after it
    Image.MAX_IMAGE_PIXELS = job.options.max_image_pixels
    error: TriptychError
    try:
        info, image = decode_image(os.pread(descriptor, os.fstat(descriptor).st_size, 0), job.options, job.param)
        os.ftruncate(descriptor, 0)
        with open(descriptor, "r+b", closefd=False) as file:
            file.writelines(strips(image))
        return DecodeAnswer(info=info)
    except TriptychError as refused:
        error = refused
    except MemoryError:
        error = BadRequest(MEMORY_TEXT, code="image_too_large", param=job.param)
    return DecodeAnswer(error=error.to_wire())


def _limit(kind: int, most: int) -> None:
    """Whatever stricter limit is there stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Entry point. Only our parent decides when we end: signals to its whole group are its own to act on."""
    jobs, parent_pid, memory_bytes = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before the kernel knew
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    warnings.simplefilter("ignore")  # a client's broken EXIF block is nothing for our log
    logging.disable()
    serve(jobs)


if __name__ == "__main__":
    main()
