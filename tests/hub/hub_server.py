"""A small Hub on loopback, in memory: as much of the protocol as the real client needs to create, upload and download
models, and to read data sets.

Endpoints: whoami, repos/create, validate-yaml, branch, preupload, LFS batch, the upload itself (one part or several),
verify, commit (and pull request), model info, tree, resolve. Commits are atomic: a revision is a mapping from path to
content.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".model")


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)  # branch -> commit
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> path -> content
    lfs: set[str] = field(default_factory=set)  # paths that are stored as LFS files
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(json.dumps([branch, len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub:` serves at `hub.url`. tokens: token -> user. part_size: repository -> bytes of one part of
    an upload, where it has several. fail: a function of (method, path) that says which requests are answered with
    which status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.tokens = {"hf_writer": "user", "hf_stranger": "stranger"}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.part_size: dict[str, int] = {}
        self.fail: Any = lambda method, path: None
        self.log: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> Hub:
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join(timeout=10)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return self.repos[repo].commits[self.repos[repo].branches[revision]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    # ------------------------------------------------------------------------------------------------ plumbing

    def answer(self, content: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        found = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in found.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.answer({"error": message}, status, headers)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def user(self) -> str | None:
        return self.server.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        path, query, content = unquote(parts.path), parse_qs(parts.query), self.body()
        with self.server.lock:
            self.server.log.append(f"{self.command} {path}")
        status = self.server.fail(self.command, path)
        if status is not None:
            self.refuse(status, "this server was told to fail")
            return
        if "Authorization" in self.headers and self.user is None and not path.startswith("/lfs/"):
            self.refuse(401, "Invalid credentials in Authorization header")
            return
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                with self.server.lock:
                    getattr(self, name)(*match.groups(), query=query, content=content)
                return
        self.refuse(404, f"no route for {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def repo(self, name: str, *, write: bool = False) -> Repo | None:
        """The repository, or None after an answer that says why not."""
        found = self.server.repos.get(name)
        mine = self.user == name.split("/")[0]
        if found is None or (found.private and not mine):
            self.refuse(404 if self.user else 401, "Repository not found", "RepoNotFound")
        elif write and not mine:
            self.refuse(403, "You don't have the rights to write here")
        else:
            return found
        return None

    # ------------------------------------------------------------------------------------------------ API

    def whoami(self, *, query: Any, content: bytes) -> None:
        self.answer({"name": self.user, "type": "user"} if self.user else None, 200 if self.user else 401)

    def create(self, *, query: Any, content: bytes) -> None:
        asked = json.loads(content)
        owner = asked.get("organization") or self.user
        if self.user is None:
            return self.refuse(401, "Invalid username or password.")
        if owner != self.user:
            return self.refuse(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        name = f"{owner}/{asked['name']}"
        if name in self.server.repos:
            return self.answer({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        repo = self.server.repos[name] = Repo(private=private)
        repo.commit(
            "main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}, "initial commit"
        )
        self.answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})

    def validate_yaml(self, *, query: Any, content: bytes) -> None:
        text = json.loads(content)["content"]
        errors = []
        match = re.match(r"---\n(.*?)\n---", text, flags=re.DOTALL)
        data = yaml.safe_load(match[1]) if match else {}
        for key, kind in {"tags": list, "datasets": list, "model-index": list, "library_name": str}.items():
            if key in data and not isinstance(data[key], kind):
                errors.append({"message": f'"{key}" must be a {kind.__name__}'})
        for entry in data.get("model-index", []):
            for result in entry.get("results", [None]):
                if not entry.get("name") or not result or not {"task", "dataset", "metrics"} <= set(result):
                    errors.append(
                        {"message": '"model-index[0]" needs a name, and results with task, dataset and metrics'}
                    )
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def branch(self, name: str, branch: str, *, query: Any, content: bytes) -> None:
        repo = self.repo(name, write=True)
        if repo is None:
            return
        if branch in repo.branches:
            return self.refuse(409, "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self.answer({})

    def info(self, name: str, revision: str | None = None, *, query: Any, content: bytes) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.at(revision or "main")
        if commit is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        siblings = [{"rfilename": path} for path in sorted(repo.commits[commit])]
        self.answer(
            {"id": name, "modelId": name, "sha": commit, "private": repo.private, "tags": [], "siblings": siblings}
        )

    def tree(self, name: str, revision: str, folder: str | None = None, *, query: Any, content: bytes) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        entries = [
            self.entry(path, data)
            for path, data in sorted(repo.commits[commit].items())
            if not folder or path.startswith(f"{folder.strip('/')}/")
        ]
        if folder and not entries:
            return self.refuse(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        self.answer(entries)

    def paths_info(self, name: str, revision: str, *, query: Any, content: bytes) -> None:
        repo = self.repo(name)
        if repo is not None:
            files, asked = repo.commits[repo.at(revision) or ""], parse_qs(content.decode()).get("paths", [])
            self.answer([self.entry(path, files[path]) for path in asked if path in files])

    @staticmethod
    def entry(path: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def refs(self, name: str, *, query: Any, content: bytes) -> None:
        repo = self.repo(name)
        if repo is not None:
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in repo.branches.items()]
            self.answer({"branches": branches, "converts": [], "tags": []})

    def preupload(self, name: str, revision: str, *, query: Any, content: bytes) -> None:
        if self.repo(name, write=not query.get("create_pr")) is None:
            return
        files = [
            {
                "path": entry["path"],
                "uploadMode": "lfs" if entry["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for entry in json.loads(content)["files"]
        ]
        self.answer({"files": files})

    def batch(self, name: str, *, query: Any, content: bytes) -> None:
        if self.repo(name) is None:
            return
        objects = []
        for entry in json.loads(content)["objects"]:
            oid, size = entry["oid"], entry["size"]
            found: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.server.objects:
                upload: dict[str, Any] = {"href": f"{self.server.url}/lfs/{oid}"}
                if name in self.server.part_size:
                    count = -(-size // self.server.part_size[name])
                    links = {f"{n:05d}": f"{self.server.url}/lfs/{oid}/{n}" for n in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(self.server.part_size[name]), **links}
                found["actions"] = {"upload": upload, "verify": {"href": f"{self.server.url}/lfs/{oid}/verify"}}
            objects.append(found)
        transfer = "multipart" if name in self.server.part_size else "basic"
        self.answer(
            {"transfer": transfer, "objects": objects}, headers={"Content-Type": "application/vnd.git-lfs+json"}
        )

    def put(self, oid: str, part: str | None = None, *, query: Any, content: bytes) -> None:
        if part is not None:
            self.server.parts.setdefault(oid, {})[int(part)] = content
        else:
            self.server.objects[oid] = content
        self.answer(headers={"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def complete(self, oid: str, *, query: Any, content: bytes) -> None:
        """All parts are sent."""
        stored = self.server.parts.pop(oid)
        self.server.objects[oid] = b"".join(stored[entry["partNumber"]] for entry in json.loads(content)["parts"])
        self.answer({})

    def verify(self, oid: str, *, query: Any, content: bytes) -> None:
        data = self.server.objects.get(oid)
        good = data is not None and hashlib.sha256(data).hexdigest() == oid
        self.answer({}) if good else self.refuse(400, "what was uploaded is not what was announced")

    def commit(self, name: str, revision: str, *, query: Any, content: bytes) -> None:
        repo = self.repo(name, write=not query.get("create_pr"))
        if repo is None:
            return
        head = repo.at(revision)
        if head is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files, lfs, summary = dict(repo.commits[head]), set(repo.lfs), ""
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                summary = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    return self.refuse(400, f"LFS pointer to {value['path']}, which was not uploaded")
                files[value["path"]] = self.server.objects[value["oid"]]
                lfs.add(value["path"])
        pull = bool(query.get("create_pr"))
        branch = f"refs/pr/{len(repo.messages)}" if pull else revision
        oid = repo.commit(branch, files, summary)
        repo.lfs = lfs
        number = branch.rpartition("/")[2]
        self.answer(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.server.url}/{name}/commit/{oid}",
                "pullRequestUrl": f"{self.server.url}/{name}/discussions/{number}" if pull else None,
            }
        )

    def resolve(self, name: str, revision: str, path: str, *, query: Any, content: bytes) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        data = repo.commits[commit].get(path)
        if data is None:
            self.send_entry_missing(commit)
            return
        etag = hashlib.sha256(data).hexdigest() if path in repo.lfs else hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.command == "GET":
            first, last = int(asked[1]), int(asked[2]) if asked[2] else len(data) - 1
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self.answer(data[first : last + 1], 206, headers)
        self.answer(data, headers=headers)

    def send_entry_missing(self, commit: str) -> None:
        headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit}
        self.answer({"error": "Entry not found"}, 404, headers)


_REPO, _KIND = r"([\w.-]+/[\w.-]+)", "(?:models|datasets)"
ROUTES = (
    (("GET",), r"/api/whoami-v2", "whoami"),
    (("POST",), r"/api/repos/create", "create"),
    (("POST",), r"/api/validate-yaml", "validate_yaml"),
    (("POST",), rf"/api/models/{_REPO}/branch/(.+)", "branch"),
    (("POST",), rf"/api/models/{_REPO}/preupload/(.+)", "preupload"),
    (("POST",), rf"/api/models/{_REPO}/commit/(.+)", "commit"),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    (("PUT",), r"/lfs/(\w{64})(?:/(\d+))?", "put"),
    (("POST",), r"/lfs/(\w{64})", "complete"),
    (("POST",), r"/lfs/(\w{64})/verify", "verify"),
    (("GET",), rf"/api/models/{_REPO}/refs", "refs"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/tree/([^/]+|refs/pr/\d+)(/.+)?", "tree"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/paths-info/(.+)", "paths_info"),
    (("GET",), rf"/api/{_KIND}/{_REPO}(?:/revision/(.+))?", "info"),
    (("GET", "HEAD"), rf"(?:/datasets)?/{_REPO}/resolve/([^/]+|refs/pr/\d+)/(.+)", "resolve"),
)
