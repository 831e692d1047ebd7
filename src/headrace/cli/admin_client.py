"""Asking a running headrace's admin API, from the command line."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.errors import AdminRequestFailed

_TIMEOUT_S: Final = 10.0
_SHOWN_CHARS: Final = 200
_KEY: Final = re.compile(r"[!-~]+")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """headrace never redirects; whoever does must not be sent the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class AdminClient:
    """``url`` is the server's, without a path; ``key`` an admin key, or None on the same machine."""

    url: str
    key: str | None = field(default=None, repr=False)

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object that the server answers. Raises AdminRequestFailed."""
        headers = {"accept": "application/json"}
        if self.key:
            # Whatever refuses it later would show it.
            if not _KEY.fullmatch(self.key):
                raise AdminRequestFailed("an admin key may hold only printable ASCII characters without spaces")
            headers["authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data, headers["content-type"] = json.dumps(body).encode(), "application/json"
        # No proxy either: this goes to a server of one's own, most often on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        try:
            request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers, method=method)  # noqa: S310
            with opener.open(request, timeout=_TIMEOUT_S) as response:
                return self._object(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise AdminRequestFailed(self._refusal(error.code, error.read())) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminRequestFailed(self._unreachable(error)) from error

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise AdminRequestFailed(f"{self.url} does not answer as headrace does; is --url right?")
        return answer

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            return f"{self.url} answered with status {status}, and not as headrace does; is --url right?"
        text = "".join(char if char.isprintable() else " " for char in str(message))
        match status:
            case 401:
                return f"{text} (give an admin key with --key or HEADRACE_ADMIN_KEY)"
            case 404:
                return f"{self.url} has no admin API: {text[:_SHOWN_CHARS]}"
            case _:
                return text

    def _unreachable(self, error: Exception) -> str:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return f"no answer from {self.url} within {_TIMEOUT_S:g} s"
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        return f"no server answers at {self.url} ({reason}); start one with `headrace serve`, or name it with --url"


def checked_url(url: str) -> str:
    """The URL without a slash at its end. Raises ValueError when it is not one of an HTTP server."""
    parts = urllib.parse.urlsplit(url)
    right = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
    if not right or _port(parts) == 0:
        raise ValueError("must look like http://127.0.0.1:8000")
    return url.rstrip("/")


def _port(parts: urllib.parse.SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        return 0
