"""Which ``Host`` a server on loopback answers to: what any http endpoint of ours asks first.

A hostile site can point its own name at 127.0.0.1 and have a reader's browser ask there (DNS rebinding). The request then
carries that name in ``Host``. An address that is a number cannot be bent like that.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

REQUEST_BYTES: Final = 8 << 10
REQUEST_S: Final = 2.0
"""What a request may have in all, body included, and how long it may take to come."""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a listening address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_known_host(header: str, names: Collection[str] = ()) -> bool:
    """Whether a ``Host`` header is an address, ``localhost`` or one of the names.

    Args:
        header: its value; with or without a port.
        names: further ones, in lower case.
    """
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdecimal() else header
    if name.lower() in {"localhost", *names}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
