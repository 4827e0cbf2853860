"""TLS of every listener: one certificate, and with ``tls_client_ca`` nobody without one of their own."""

from __future__ import annotations

import ssl

from sparrow.model.errors import InvalidSettings
from sparrow.model.settings import ServerSettings


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """What connections are encrypted with; none when no certificate is set."""
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettings(
            f"server.tls_certificate or server.tls_key cannot be used: {error}",
            hint="Give PEM files of a certificate chain and of its key.",
        ) from error
    if settings.tls_client_ca:
        try:
            context.load_verify_locations(cafile=settings.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(
                f"server.tls_client_ca cannot be used: {error}",
                hint="Give a PEM file of the authorities that sign the clients' certificates.",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
