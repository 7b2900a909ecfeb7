"""A page and its assets for a browser: static files that load nothing from another host.

    /              index.html of the page's folder
    /static/...    what lies beside it, and what all pages share (weft/web/static), under one address

Nothing is built: what a browser gets are the files as they lie here.
"""

from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(room: str) -> list[BaseRoute]:
    """Return the routes of the page in the folder `static` of a room, as "dashboard"; their answers carry `HEADERS`."""
    folder = Path(str(files("weft") / room / "static"))

    async def page(_request: Request) -> Response:
        return FileResponse(folder / "index.html", headers=HEADERS)

    return [Route("/", page), Mount("/static", _Assets(directory=folder, packages=[("weft.web", "static")]))]


class _Assets(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers.update(HEADERS)
        return answer
