"""Show a made-up history in a browser: `python tests/dashboard/devserver.py [--many] [--live] [--public] [--port N]`.

It serves the page as `weft watch` does, under the same strict policy. With --live the last third of the history comes
round by round through the stream, one a second. It listens on loopback alone.
"""

import argparse
import gzip
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fixture import LISTS, Tree, few, many

STATIC = Path(__file__).parents[2] / "src" / "weft" / "dashboard" / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
PIECE_S = 1.0


def cut(tree: Tree, share: float) -> tuple[Tree, list[Tree]]:
    """Return what there is after a share of the rounds, and the rounds that come, a piece each."""
    ends = [row[0] for row in tree["rounds"]]
    now = ends[int(len(ends) * share) - 1]
    timed = [name for name in LISTS if name != "peers"]
    rest = {name: rows for name, rows in tree.items() if name not in timed}
    first = rest | {name: [row for row in tree[name] if row[0] <= now] for name in timed}
    later = [end for end in ends if end > now]
    pieces = [
        {"run": tree["run"], **{name: [row for row in tree[name] if since < row[0] <= end] for name in timed}}
        for since, end in zip([now, *later], later, strict=False)
    ]
    return first | {"is_live": True, "cursor": 0}, [{"cursor": n + 1, **piece} for n, piece in enumerate(pieces)]


class Page(BaseHTTPRequestHandler):
    whole = b""
    pieces: tuple[Tree, ...] = ()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/history":
            return self._answer(self.whole, "application/json", encoding="gzip")
        if path == "/api/stream":
            return self._stream()
        file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
        if not file.resolve().is_relative_to(STATIC) or not file.is_file():
            return self.send_error(404)
        return self._answer(file.read_bytes(), KINDS.get(file.suffix, "text/plain"))

    def _head(self, kind: str, **more: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Security-Policy": POLICY, **more}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _answer(self, body: bytes, kind: str, encoding: str = "identity") -> None:
        self._head(f"{kind}; charset=utf-8", Content_Length=str(len(body)), Content_Encoding=encoding)
        self.wfile.write(body)

    def _stream(self) -> None:
        self._head("text/event-stream", Cache_Control="no-cache")
        after = int(self.headers.get("Last-Event-ID") or self.path.partition("after=")[2] or 0)
        try:
            for piece in self.pieces[after:]:
                time.sleep(PIECE_S)
                self.wfile.write(f"event: more\nid: {piece['cursor']}\ndata: {json.dumps(piece)}\n\n".encode())
            self.wfile.write(b"event: end\ndata: {}\n\n")
        except OSError:  # the browser went
            return

    def log_message(self, *_: Any) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--many", "--live", "--public"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    tree = many() if options.many else few()
    pieces: list[Tree] = []
    if options.live:
        tree, pieces = cut(tree, 2 / 3)
    tree = {"cursor": 0} | tree | {"is_public": options.public}
    Page.whole, Page.pieces = gzip.compress(json.dumps(tree).encode(), 1), tuple(pieces)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Page)
    server.daemon_threads = True
    sys.stdout.write(f"http://127.0.0.1:{options.port}/\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
