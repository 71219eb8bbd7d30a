"""A server with the part of the Hugging Face Hub's API that uploads models."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Hub(ThreadingHTTPServer):
    """Repositories in memory, with their `files` by path and whether they are
    `private`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, daemon=True).start()


def _described(path: str, content: bytes) -> dict:
    whole = b"blob %d\0" % len(content) + content
    blob = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    found = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith((".safetensors", ".npy")):
        oid = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return found


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def _answer(self, found, status: int = 200, **headers: str) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        self.server.objects[self.path.rsplit("/", 1)[-1]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        found = re.match(r"/api/models/([^/]+/[^/]+)(/tree/.*)?", self.path)
        files = self.server.files.get(found[1]) if found else None
        if files is None:
            self._answer({"error": "no"}, 404, X_Error_Code="RepoNotFound")
        elif found[2]:
            self._answer([_described(*one) for one in files.items()])
        else:
            names = [{"rfilename": name} for name in files]
            self._answer({"id": found[1], "sha": "1" * 40, "siblings": names})

    def do_POST(self) -> None:
        hub, body, path = self.server, self._body(), self.path
        hub.asked.append(f"POST {path}")
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._answer({"error": "Invalid token"}, 401)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            if name in hub.files:
                self._answer({"url": f"{hub.url}/{name}"}, 409)
                return
            hub.files[name] = {".gitattributes": b"*"}
            hub.private[name] = bool(
                given.get("private") or given.get("visibility") == "private"
            )
            self._answer({"url": f"{hub.url}/{name}"})
        elif "/preupload/" in path:
            kinds = [
                {
                    "path": one["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs"
                    if "lfs" in _described(one["path"], b"")
                    else "regular",
                }
                for one in json.loads(body)["files"]
            ]
            self._answer({"files": kinds})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **one,
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}},
                }
                for one in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            name = re.match(r"/api/models/([^/]+/[^/]+)/", path)[1]
            for line in map(json.loads, body.splitlines()):
                self._apply(hub.files[name], line["key"], line["value"])
            oid = "2" * 40
            url = f"{hub.url}/{name}/commit/{oid}"
            self._answer({"success": True, "commitOid": oid, "commitUrl": url})
        else:
            self._answer({"error": path}, 404)

    def _apply(self, files: dict[str, bytes], key: str, value: dict) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.server.objects[value["oid"]]
        elif key == "deletedFile":
            files.pop(value["path"])
