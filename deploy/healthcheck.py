"""The health check of the image: asks the process of the container at `/healthz`, and exits with 0 if it is healthy.

The port is that of the variable DEFORMER_HTTP. Without it, as in a container that trains, there is nothing to ask, and
the exit status is 0.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_SECONDS = 5.0


def is_healthy(address: str) -> bool:
    """Return whether the process that listens at an address `[HOST]:PORT` answers that it is healthy.

    Args:
        address: The address, of which only the port is used. The request goes to this machine.
    """
    connection = http.client.HTTPConnection("localhost", int(address.rpartition(":")[2]), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    address = os.environ.get("DEFORMER_HTTP", "")
    sys.exit(0 if not address or is_healthy(address) else 1)
