"""The chat page: its modules under node, and what a browser gets of it."""

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from weft.web.web import page_routes

FOLDERS = [Path(str(files("weft") / room / "static")) for room in ("web", "serve")]
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on the path: the page's modules were tried by nobody")
def test_the_modules_of_the_page_do_what_they_say(tmp_path: Path) -> None:
    assert NODE is not None
    for path in [script for folder in FOLDERS for script in folder.glob("*.js")]:
        shutil.copy(path, tmp_path)
    shutil.copy(Path(__file__).parent / "chat_page.test.mjs", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    ran = subprocess.run([NODE, "chat_page.test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_browser_gets_the_page_and_may_ask_nobody_else() -> None:
    client = TestClient(Starlette(routes=page_routes("serve")))
    page = client.get("/")
    named = set(re.findall(r'(?:href|src)="(static/[\w.]+)"', page.text))
    assert {"static/base.css", "static/style.css", "static/main.js", "static/icon.svg"} == named
    imported = {name for folder in FOLDERS for script in folder.glob("*.js") for name in imports(script)}
    for name in ["", *named, *(f"static/{each}" for each in imported)]:
        answer = client.get(f"/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'; connect-src 'self'" in policy
        assert "unsafe" not in policy


def test_nothing_on_the_page_is_from_elsewhere_or_becomes_markup() -> None:
    for path in [path for folder in FOLDERS for path in folder.iterdir()]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path


def imports(script: Path) -> list[str]:
    return re.findall(r'from "\./([\w.]+)"', script.read_text(encoding="utf-8"))
