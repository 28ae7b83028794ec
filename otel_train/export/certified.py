"""An http session that checks a collector with the certificate that was named for it."""

from __future__ import annotations

from typing import Any


def certified_session(certificate: str) -> Any:  # Any: requests has no types
    """A session for the SDK's http exporters.

    Many machines name their own authorities in ``REQUESTS_CA_BUNDLE`` or ``CURL_CA_BUNDLE``, and requests lets those
    win over the certificate that the exporter sets on its session. Proxies still come from the environment.

    Args:
        certificate: path of a PEM file.
    """
    import requests

    session: Any = requests.Session()  # Any: one of its methods is replaced
    usual = session.merge_environment_settings

    def merged(url: str, proxies: Any, *rest: Any) -> Any:  # Any: as requests calls it
        stream, verify, cert = rest
        return usual(url, proxies, stream, certificate if verify in {True, None} else verify, cert)

    session.merge_environment_settings = merged
    return session
