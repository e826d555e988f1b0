"""The header of saved state: what it is, its format version, and a checksum of what follows.

magic (8 bytes) | kind (1) | format version (2, big-endian) | SHA-256 of the body (32) | body
"""

from __future__ import annotations

import struct

MAGIC = b"deformer"
HEADER = struct.Struct(">8scH32s")
