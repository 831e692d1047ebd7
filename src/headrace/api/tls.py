"""HTTPS: the server's TLS context from the configuration, and renewed certificates without a restart."""

from __future__ import annotations

import ssl
from typing import Final

from headrace.config.schema import TlsConfig
from headrace.errors import ConfigError

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_WHERE: Final = "server.tls"


def tls_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """A context for the listening sockets, None for plain HTTP. Raises ConfigError when the files cannot be read or do
    not belong together; the message names files, never what is in them."""
    if tls.certificate is None or tls.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _load(context, tls)
    return context


def renew(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Let connections from now on be made with these files and this version; those that are open stay as they are.
    Raises ConfigError, with nothing changed."""
    if tls_context(tls) is None:  # a trial: loading into the context in use could leave half of it behind
        raise ConfigError("whether the server speaks TLS is decided at its start", where=_WHERE)
    _load(context, tls)


def _load(context: ssl.SSLContext, tls: TlsConfig) -> None:
    assert tls.certificate is not None and tls.key is not None

    def no_password() -> str:
        raise ConfigError(f"{tls.key} is encrypted; write the key without a password", where=f"{_WHERE}.key")

    try:
        context.load_cert_chain(tls.certificate, tls.key, password=no_password)
    except ssl.SSLError as error:
        reason = error.reason or "not PEM"
        raise ConfigError(
            f"{tls.certificate} and {tls.key} cannot be used as certificate and key: {reason}", where=_WHERE
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{tls.certificate} or {tls.key} cannot be read: {error.strerror or error}", where=_WHERE
        ) from error
    context.minimum_version = _VERSIONS[tls.minimum_version]
