"""Cross-origin requests of web pages: refused by browsers unless an origin is configured, and never with credentials.

An origin that is listed is named in the answer, "*" is answered as "*": no other origin is ever repeated. Keys travel
in the Authorization header, which scripts set themselves, so that `Access-Control-Allow-Credentials` is not needed.
"""

from __future__ import annotations

from aiohttp import web

_EXPOSED = (
    "x-request-id, x-specd-seed, x-specd-drafter, x-specd-accept-length, x-specd-ignored-fields, openai-processing-ms,"
    " retry-after, retry-after-ms, x-should-retry"
)


class Cors:
    """What `server.cors_origins` allows."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser's question before the real request; None where it is none, or is not allowed."""
        asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asked or self._allowed(request) is None:
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "Authorization, *",  # "*" does not cover Authorization
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers for every response, errors included: a page could not read them otherwise."""
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        origin = self._allowed(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        """The value of Access-Control-Allow-Origin."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return "*" if "*" in self._origins else origin if origin in self._origins else None
