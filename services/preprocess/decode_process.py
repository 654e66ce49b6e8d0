"""The owner's side of decode_worker.py: one worker process, started again when it is lost. Blocks: for one thread at a time.

A picture in whose decoding a worker ends is tried once more; one that takes too much time or memory is the client's fault.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec

from triptych.cache.keys import NUM_CHANNELS
from triptych.services.preprocess import decode_worker
from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_worker import MAX_MESSAGE_BYTES, DecodeAnswer, DecodeJob
from triptych.shared.errors import BadRequest, InternalError, Overloaded, from_wire
from triptych.shared.image_info import ImageInfo

MAX_TRIES = 2
WALL_FACTOR = 3  # chosen: a worker that gets less than a third of a core is on a machine with too much to do
END_TIMEOUT_S = 10.0  # chosen: a killed process of gigabytes is gone in well under a second
SLOW_TEXT = "the image takes too long to decode: save it again in an ordinary way"
BUSY_TEXT = "the server has no time to decode the image now: try again later"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """pixels: uint8 [height, width, 3] after the model's resize, in memory that is freed with this; none of an emulated one."""

    info: ImageInfo
    pixels: mmap.mmap | bytes


class _WorkerLostError(Exception):
    """It ended before it answered."""


class DecodeProcess:
    """cpu_s: what one picture may take. memory_bytes: address space of the worker."""

    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: socket.socket | None = None
        self._is_closed = False
        self._lock = threading.RLock()  # of whoever uses the socket

    @property
    def pid(self) -> int | None:
        """Of the worker, while there is one."""
        return self._process.pid if self._process is not None else None

    def decode(self, encoded: bytes | bytearray, options: DecodeOptions, param: str) -> DecodedImage:
        """`decode_image` in the worker.

        Raises:
            BadRequest: see decode_image; or it takes too much time or memory.
            Overloaded: the machine is too busy, or we are closed.
            InternalError: each try ended its worker.
        """
        job = msgspec.msgpack.encode(DecodeJob(options, param, self._cpu_s))
        for _ in range(MAX_TRIES):
            descriptor = os.memfd_create("triptych-picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                return self._try(job, descriptor, encoded, param)
            except _WorkerLostError:
                continue
            finally:
                os.close(descriptor)
        raise InternalError("the image ends whatever decodes it")

    def _try(self, job: bytes, descriptor: int, encoded: bytes | bytearray, param: str) -> DecodedImage:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(encoded)
            file.seek(0)
        with self._lock:
            answer = self._ask(job, descriptor, param)
        if answer.error is not None:
            raise from_wire(answer.error)
        if answer.info is None:
            raise InternalError("a decode worker answered with nothing")
        return DecodedImage(answer.info, _map_pixels(descriptor, answer.info))

    def _ask(self, job: bytes, descriptor: int, param: str) -> DecodeAnswer:
        jobs = self.start()
        try:
            socket.send_fds(jobs, [job], [descriptor])
            answer = jobs.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            self._end()
            raise Overloaded(BUSY_TEXT) from None
        except OSError:
            answer = b""
        if not answer:
            status = self._end()
            if status == -signal.SIGXCPU:
                raise BadRequest(SLOW_TEXT, code="invalid_image", param=param)
            if not self._is_closed:
                log.warning("a decode worker ended with status %s in the middle of an image", status)
            raise _WorkerLostError
        return msgspec.msgpack.decode(answer, type=DecodeAnswer)

    def start(self) -> socket.socket:
        """The worker's socket; it is started unless it runs. Raises Overloaded when that is not possible."""
        with self._lock:
            if self._is_closed:
                raise Overloaded("the server is shutting down: try again")
            if self._jobs is None or self._process is None or self._process.poll() is not None:
                self._end()
                self._jobs = self._begin()
            return self._jobs

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout((self._cpu_s + 1) * WALL_FACTOR)  # the kernel counts whole seconds of CPU
        arguments = (str(theirs.fileno()), str(os.getpid()), str(self._memory_bytes))
        command = (sys.executable, "-P", "-m", decode_worker.__name__, *arguments)
        with theirs:
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
            except OSError as error:
                ours.close()
                raise Overloaded(BUSY_TEXT) from error
        if self._is_closed:
            self._process.kill()  # `close` may not have seen it
        return ours

    def _end(self) -> int | None:
        """Kill what is left of the worker; its exit status. It may have ended by itself."""
        process, jobs = self._process, self._jobs
        self._process = self._jobs = None
        if jobs is not None:
            jobs.close()
        if process is None:
            return None
        process.kill()
        return process.wait(END_TIMEOUT_S)

    def close(self) -> None:
        """From any thread: the worker ends now, and no other is started. A `decode` under way fails."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()


def _map_pixels(descriptor: int, info: ImageInfo) -> mmap.mmap:
    num_bytes = info.height * info.width * NUM_CHANNELS
    # sealed first: a file that can still shrink under a mapping can end us
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    if os.fstat(descriptor).st_size != num_bytes:
        raise InternalError("a decoded image has another size than its worker says")
    return mmap.mmap(descriptor, num_bytes)
