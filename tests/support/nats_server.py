"""A NATS server of the test's own, with a bound on messages, to see what the product puts on the bus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from support.cluster import wait_for
from triptych.shared.tied_exec import tied


class NatsServer:
    """On 127.0.0.1 and a free port, which it chooses itself and writes to a file."""

    def __init__(self, folder: Path, max_payload_bytes: int) -> None:
        self._log = folder / "nats.log"
        config = folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:-1"\nmax_payload: {max_payload_bytes}\nports_file_dir: "{folder}"\nlog_file: "{self._log}"\n'
        )
        self._process = subprocess.Popen(tied(str(Path(sys.executable).with_name("nats-server")), "-c", str(config)))
        ports = folder / f"nats-server_{self._process.pid}.ports"
        try:
            wait_for(lambda: ports.exists() and ports.read_text().endswith("}"), 20, "the NATS server's ports file")
            [url] = json.loads(ports.read_text())["nats"]
        except BaseException:
            self.stop()
            raise
        self.url = f"nats://127.0.0.1:{urlsplit(url).port}"

    def payload_error(self) -> str | None:
        """A line of the log that tells of a message over the bound."""
        lines = self._log.read_text().splitlines()
        return next((line for line in lines if "maximum payload" in line.lower()), None)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(10)
