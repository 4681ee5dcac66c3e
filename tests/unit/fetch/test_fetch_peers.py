"""Models copied from another node's worker: what is given to whom, what is checked, what is gone on with."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
import xxhash
from bringing import DEMO, MODEL, Go, parts_below, split_demo
from givers import Giver
from msgspec.structs import replace

from muster.errors import FetchError, ModelError
from muster.fetch import hub, peers
from muster.fetch.held import held_models
from muster.layout import ModelSource
from muster.model.files import fingerprint, inspect
from muster.model.hub import repository_directory
from muster.peer_protocol import FetchFile, FileFollows, Files, PeerFile
from muster.testing.hub import commit_of
from muster.worker.giving import Giving


@pytest.fixture
def giver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Giver]:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = Giver(tmp_path)
    with anyio.from_thread.start_blocking_portal() as portal:
        future, _ = portal.start_task(made.serve)
        yield made
        future.cancel()


@pytest.fixture
def model(giver: Giver) -> Path:
    split_demo(giver.directory / "tiny")
    return giver.directory / "tiny"


def go(giver: Giver, model: Path, tmp_path: Path, layers: range | None = None, name: str = "copies") -> Go:
    """The model is asked for by a path that there is not on this node."""
    return Go(layers, model=f"/elsewhere{model}", sources=(giver.source(model),), copies=tmp_path / name)


def test_a_directory_is_copied_once(giver: Giver, model: Path, tmp_path: Path) -> None:
    first = go(giver, model, tmp_path)
    path = first.path()
    assert fingerprint(path) == fingerprint(model)
    assert inspect(path).tensors.keys() == inspect(model).tensors.keys()
    assert {one.source for one in first.brought} == {"node b"}
    assert first.moved[-1].note == "from node b"
    asked = len(giver.fetched)
    again = go(giver, model, tmp_path)
    assert (again.path(), again.brought, len(giver.fetched)) == (path, [], asked)


def test_a_copy_is_used_when_its_node_is_gone(giver: Giver, model: Path, tmp_path: Path) -> None:
    path = go(giver, model, tmp_path).path()
    assert Go(model=f"/elsewhere{model}", copies=tmp_path / "copies").path() == path
    dead = giver.source(model, port=9)
    assert Go(model=f"/elsewhere{model}", copies=tmp_path / "copies", sources=(dead,)).path() == path


def test_a_model_that_changed_is_copied_again(giver: Giver, model: Path, tmp_path: Path) -> None:
    path = go(giver, model, tmp_path).path()
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    other = go(giver, model, tmp_path).path()
    assert other != path
    assert fingerprint(other) == fingerprint(model)


def test_parts_of_a_copy_have_the_fingerprint_of_the_whole(giver: Giver, model: Path, tmp_path: Path) -> None:
    part = go(giver, model, tmp_path, range(3, 4)).path()
    assert len(list(part.glob("*.safetensors"))) == 2
    assert fingerprint(part) == fingerprint(model)
    rest = go(giver, model, tmp_path, range(3)).path()
    assert rest == part
    inspect(rest)


def test_a_snapshot_is_copied_as_a_snapshot(giver: Giver, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()}
    snapshot = repository_directory(giver.cache, MODEL) / "snapshots" / commit_of(files)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))
    held = next(one for one in held_models((), giver.cache) if one.model == MODEL)
    assert (held.revision, held.complete) == (commit_of(files), True)
    asked = Go(sources=(giver.source(Path(held.path)),), copies=tmp_path / "copies", revision=held.revision)
    path = asked.path()
    assert path == repository_directory(tmp_path / "copies", MODEL) / "snapshots" / held.revision
    assert fingerprint(path) == fingerprint(snapshot)
    inspect(path)
    again = Go(copies=tmp_path / "copies", revision=held.revision)
    assert (again.path(), again.brought) == (path, [])
    other = Go(sources=(giver.source(Path(held.path)),), copies=tmp_path / "copies", revision="0" * 40)
    with pytest.raises(ModelError, match="not complete on this node"):
        other.path()


def test_what_came_is_gone_on_with(giver: Giver, model: Path, tmp_path: Path) -> None:
    path = go(giver, model, tmp_path).path()
    weights = sorted(model.glob("*.safetensors"))[1]
    content = weights.read_bytes()
    (path / weights.name).unlink()
    (path / f"{weights.name}.muster-part").write_bytes(content[:100_000])
    giver.fetched.clear()
    assert go(giver, model, tmp_path).path() == path
    assert [(one.name, one.offset) for one in giver.fetched] == [(weights.name, 100_000)]
    assert (path / weights.name).read_bytes() == content
    assert parts_below(tmp_path) == []


def test_a_wrong_part_is_thrown_away(giver: Giver, model: Path, tmp_path: Path) -> None:
    path = go(giver, model, tmp_path).path()
    weights = sorted(model.glob("*.safetensors"))[1]
    (path / weights.name).unlink()
    (path / f"{weights.name}.muster-part").write_bytes(b"x" * 100_000)
    giver.fetched.clear()
    assert go(giver, model, tmp_path).path() == path
    assert [one.offset for one in giver.fetched] == [100_000, 0]
    assert (path / weights.name).read_bytes() == weights.read_bytes()


def test_what_is_corrupted_twice_is_named(
    giver: Giver, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sorted(model.glob("*.safetensors"))[1]

    def known(file: Path) -> str:
        return "f" * 32 if file.name == weights.name else ""

    monkeypatch.setattr(giver.giving._digests, "known", known)
    with pytest.raises(ModelError, match=rf"{weights.name} came from node b twice and is corrupted") as raised:
        go(giver, model, tmp_path).path()
    assert "node b" in raised.value.remedy
    assert parts_below(tmp_path) == []
    assert not list((tmp_path / "copies").rglob(weights.name))


def _note_path(one: Go, paths: list[Path]) -> None:
    paths.append(one.path())


def test_several_are_fed_at_once(giver: Giver, model: Path, tmp_path: Path) -> None:
    goes = [go(giver, model, tmp_path, name=f"copies-{number}") for number in range(4)]
    paths: list[Path] = []
    threads = [threading.Thread(target=_note_path, args=(one, paths)) for one in goes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(paths)) == 4
    assert {fingerprint(path) for path in paths} == {fingerprint(model)}


def test_a_source_that_is_gone_is_passed_over(giver: Giver, model: Path, tmp_path: Path) -> None:
    sources = (giver.source(model, node="a", port=9), giver.source(model))
    asked = Go(model=f"/elsewhere{model}", sources=sources, copies=tmp_path / "copies")
    assert fingerprint(asked.path()) == fingerprint(model)
    assert {one.source for one in asked.brought} == {"node b"}


def test_nobody_gives_it(giver: Giver, model: Path, tmp_path: Path) -> None:
    dead = giver.source(model, node="a", port=9)
    with pytest.raises(FetchError, match=r"cannot be copied from node a at 127\.0\.0\.1:9") as raised:
        Go(model=f"/elsewhere{model}", sources=(dead,), copies=tmp_path / "copies").path()
    assert "muster links" in raised.value.remedy


def test_a_node_that_falls_silent(tmp_path: Path, model: Path, giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = giver.source(model, node="c", port=silent.getsockname()[1])
        with pytest.raises(FetchError, match=r"from node c .*it sends nothing for 0\.1 s"):
            Go(model=f"/elsewhere{model}", sources=(source,), copies=tmp_path / "copies").path()


# --- what is given --------------------------------------------------------------------------------------------


def test_only_models_are_given_and_only_their_files(giver: Giver, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (model / "notes.md").write_text("private")
    (model / "leak.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "outside").mkdir()
    listed = peers.listing(giver.source(model))
    assert not {file.name for file in listed.files} & {"notes.md", "leak.json"}
    for path, name in (
        (model, "../secret.json"),
        (model, str(tmp_path / "secret.json")),
        (model, "leak.json"),
        (model, "notes.md"),
        (model / "..", "tiny/config.json"),
        (tmp_path / "outside", "config.json"),
        (tmp_path, "secret.json"),
    ):
        file = PeerFile(name=Path(name).name, bytes=2)
        with pytest.raises(FetchError, match=r"given to other|no model in"):
            ask_for(giver.source(path), name, file)


def ask_for(source: ModelSource, name: str, file: PeerFile) -> None:
    with peers.connected(source) as connection:
        peers.send(connection, FetchFile(path=source.path, name=name))
        reply = peers.answer(connection, source)
        assert not isinstance(reply, FileFollows | Files), (name, file)


def test_a_digest_is_found_out_once_and_again_after_a_change(
    giver: Giver, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muster.worker import giving

    read: list[Path] = []
    really = giving._read

    def counting(file: Path) -> str:
        read.append(file)
        return really(file)

    monkeypatch.setattr(giving, "_read", counting)
    config = model / "config.json"
    digests = giver.giving._digests
    assert digests.known(config) == ""
    first = digests.find(config)
    assert (digests.find(config), digests.known(config), len(read)) == (first, first, 1)
    config.write_text(config.read_text() + " ")
    assert digests.find(config) == xxhash.xxh3_128_hexdigest(config.read_bytes()) != first


@pytest.mark.parametrize("revision", ["../../x", "/tmp/x", "a//b", "a/./b", "a\0b"])
def test_a_revision_names_nothing_outside_of_the_cache(tmp_path: Path, revision: str) -> None:
    listed = hub.Listing(model=MODEL, commit="0" * 40, files=())
    with pytest.raises(ModelError, match="no name of a branch or tag"):
        hub.name_revision(tmp_path, listed, revision)
    assert not list(tmp_path.iterdir())
    hub.name_revision(tmp_path, listed, "refs/pr/1")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


# --- a node that is not what it seems -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/tmp/x", "../../x.json", "a/b", "", ".", "..", ".hidden", "a\\b", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(
    giver: Giver, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = Giving._list

    def suspect(lie: Callable[[Files], Files]) -> None:
        monkeypatch.setattr(Giving, "_list", lambda self, request: lie(honest(self, request)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        with pytest.raises(FetchError, match=r"nothing is copied from node b at .*: it "):
            go(giver, model, tmp_path).path()
        assert giver.fetched == []
        assert not (tmp_path / "copies").exists() or not list((tmp_path / "copies").rglob("*.json"))

    suspect(lambda files: replace(files, files=(*files.files, PeerFile(name=name, bytes=1))))
    suspect(lambda files: replace(files, weights=(*files.weights, name)))
    if name:
        suspect(lambda files: replace(files, identity=name))
        suspect(lambda files: replace(files, revision=name))
