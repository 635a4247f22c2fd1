"""URLs that others use too: two jobs write to one, links lie there, and credentials stay out of what is said."""

from __future__ import annotations

import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem

import zeor
from tests.checkpoint.files import shelf
from tests.checkpoint.files.jobs import manifest_of
from tests.checkpoint.test_reshard import make
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import store
from zeor.checkpoint.files.branches import Lineage
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.hidden import LEFTOVER_SECONDS
from zeor.checkpoint.files.manifest import NAME
from zeor.checkpoint.files.store import UrlAttempt
from zeor.checkpoint.files.urls import Uploads, Url, place_of, shown
from zeor.checkpoint.files.writer import Source, write_file
from zeor.checkpoint.verify import describe, verify

shelf.put_up()
STEPS = ("begin", "write", "commit", "clean")


class Job:
    """What zeor.save does at a URL, one step after the other."""

    def __init__(self, folder: Url, step: int, value: float):
        self.folder, self.value, self.attempt = folder, value, UrlAttempt(folder, step)

    def begin(self) -> None:
        self.attempt.begin()

    def write(self) -> None:
        import torch

        tensor = torch.full((100,), self.value)
        source = Source("param/weight@0", torch.float32, (100,), lambda: tensor)
        self.info = write_file(Uploads(), self.attempt.writing / "rank-00000.safetensors", [source])

    def commit(self) -> None:
        branch = Lineage().next(self.folder, store.complete(self.folder))
        self.attempt.commit(manifest_of(self.attempt.step, self.info, branch))

    def clean(self) -> None:
        store.clean(Uploads(), self.folder, None, self.attempt.final)

    def save(self) -> Url:
        for step in STEPS:
            getattr(self, step)()
        return self.attempt.final


def url_of(path: Path) -> Url:
    url = place_of(f"shelf://{path}")
    assert isinstance(url, Url)
    return url


def problems(folder: Url) -> list[str]:
    found = []
    for each in store.complete(folder):
        description = describe(each.path)
        verify(description)
        found += description.problems
    return found


def orders() -> list[tuple[int, ...]]:
    count = len(STEPS)
    return [
        tuple(0 if n in firsts else 1 for n in range(2 * count))
        for firsts in map(set, itertools.combinations(range(2 * count), count))
    ]


# ---- two jobs


@pytest.mark.parametrize("steps", [(5, 5), (5, 7), (7, 5)])
def test_whatever_the_order_of_two_jobs_both_have_what_they_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int]
) -> None:
    """Each is a process of its own: neither knows the other's claims but by what lies there."""
    known: list[dict[str, bool]] = [{}, {}]
    for number, order in enumerate(orders()):
        folder = url_of(tmp_path / str(number))
        jobs: list[Job] = []
        for value, step in enumerate(steps):
            jobs.append(Job(folder, step, float(value)))
        todo = [iter(STEPS), iter(STEPS)]
        for who in order:
            monkeypatch.setattr(store, "_claims", known[who])
            getattr(jobs[who], next(todo[who]))()
            assert problems(folder) == []
        found = {each.path.name: each.path for each in store.complete(folder)}
        assert sorted(found) == sorted(job.attempt.name for job in jobs) and len(found) == 2
        for job in jobs:
            size = (job.attempt.final / "rank-00000.safetensors").stat().st_size
            assert size == job.info.nbytes and parse_hash(found[job.attempt.name]) == job.info.blocks
        assert sorted(folder.names()) == sorted(found)


def parse_hash(path: Any) -> list[str]:
    manifest = describe(path).manifest
    assert manifest is not None
    return manifest.files[0].blocks


def test_jobs_that_see_each_others_claims_go_on_to_different_names(tmp_path: Path) -> None:
    """Both claim step 5 before either looks."""
    folder = url_of(tmp_path / "run")
    one, other = UrlAttempt(folder, 5), UrlAttempt(folder, 5)
    looks = iter([lambda: other._rank_among_claims()])
    names = folder.names

    class Watched(Url):
        def names(self) -> list[str]:
            for look in looks:
                look()  # the other claims now
            return names() if self.path == folder.path else super().names()

    one._folder = Watched(folder.fs, folder.path, str(folder))
    one.begin()
    other._drop_claim()
    other.begin()
    assert one.name != other.name and {one.step, other.step} == {5}


def test_giving_up_spares_what_another_job_has_under_the_name(tmp_path: Path) -> None:
    folder = url_of(tmp_path / "run")
    late = UrlAttempt(folder, 5)
    first = Job(folder, 5, 1.0).save()
    assert late.name == first.name
    assert late.abandon()  # it never began
    late = UrlAttempt(folder, 5)
    late.number = 0
    late.begin()
    assert late.name == f"{first.name}.1" and late.abandon()
    assert folder.names() == [first.name] and problems(folder) == []


def test_a_claim_of_others_holds_for_an_hour_and_what_was_claimed_goes_with_it(tmp_path: Path) -> None:
    folder = url_of(tmp_path / "run")
    (tmp_path / "run" / "step-000000000005").mkdir(parents=True)
    (tmp_path / "run" / "step-000000000005" / "rank-00000.safetensors").write_bytes(b"half")
    claim = tmp_path / "run" / ".writing-step-000000000005-0123456789abcdef"
    claim.write_text(str(int(time.time())))
    first = Job(folder, 6, 1.0).save()
    assert sorted(folder.names()) == [claim.name, "step-000000000005", first.name]
    claim.write_text(str(int(time.time() - 2 * LEFTOVER_SECONDS)))
    second = Job(folder, 7, 1.0).save()
    assert sorted(folder.names()) == [first.name, second.name]


# ---- links and others' files


def test_a_linked_checkpoint_at_a_url_is_unlinked_alone(tmp_path: Path) -> None:
    theirs = Job(url_of(tmp_path / "a"), 1, 1.0).save()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a" / theirs.name).iterdir()}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / theirs.name).symlink_to(tmp_path / "a" / theirs.name)
    new = Job(url_of(tmp_path / "b"), 2, 1.0).save()
    store.clean(Uploads(), url_of(tmp_path / "b"), 1, new)
    assert os.listdir(tmp_path / "b") == [new.name]
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / theirs.name).iterdir()} == before


def test_what_zeor_did_not_write_stays_at_a_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = make(0)
    folder = tmp_path / "run"
    save(f"shelf://{folder}", model, optimizer, step=1)
    (folder / "step-000000000001" / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, "zeor"):
        for step in (2, 3):
            save(f"shelf://{folder}", model, optimizer, step=step, keep=1)
    assert sorted(os.listdir(folder)) == ["step-000000000001", "step-000000000003"]
    assert os.listdir(folder / "step-000000000001") == ["notes.txt"]
    assert "step-000000000001 holds 'notes.txt', which zeor did not write; that stays" in caplog.text


def test_a_folder_at_a_url_named_for_another_step_is_passed_over(tmp_path: Path) -> None:
    model, optimizer, _ = make(0)
    for step in (1, 2):
        save(f"shelf://{tmp_path}/run", model, optimizer, step=step)
    (tmp_path / "run" / "step-000000000002").rename(tmp_path / "run" / "step-000000000009")
    assert load(f"shelf://{tmp_path}/run", model, optimizer).step == 1


# ---- credentials

SECRET = "s3cr3t/Key%2B1"
MEANT = "s3cr3t/Key+1"


class Vault(AbstractFileSystem):
    """Every call fails, and the error says with which password it was tried."""

    protocol = "vault"
    cachable = False

    def _fail(self, *args: Any, **options: Any) -> Any:
        raise ConnectionError(f"vault://user:{SECRET}@host refuses {MEANT!r} and ?token=tokenvalue")

    info = ls = open = cat_file = pipe_file = makedirs = rm = rm_file = _fail


class Shy(Vault):
    """It cannot even be made."""

    protocol = "shy"

    def __init__(self, *args: Any, **options: Any):
        self._fail()


URLS = [
    f"vault://user:{SECRET}@host/run",
    f"vault://host/run?token=tokenvalue&key={SECRET}",
    f"shy://user:{SECRET}@host/run",
    f"nowhere://user:{SECRET}@host/run",
]


def actions(url: str, tmp_path: Path) -> list[Callable[[], Any]]:
    model, optimizer, _ = make(0)
    return [
        lambda: save(url, model, optimizer, step=1),
        lambda: save(url, model, optimizer, step=1, asynchronous=True).wait(),
        lambda: save(f"{url}\0", model, optimizer, step=1),
        lambda: load(url, model, optimizer),
        lambda: zeor.export(url, tmp_path / "out"),
        lambda: zeor.export(model, url),
    ]


@pytest.mark.parametrize("url", URLS)
def test_no_error_shows_what_a_url_hides(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in (Vault, Shy):
        fsspec.register_implementation(each.protocol, each, clobber=True)
    told = []
    for do in actions(url, tmp_path):
        with pytest.raises((CheckpointError, ValueError)) as raised:
            do()
        told.append("".join(traceback.format_exception(raised.value)))
    said = "\n".join([*told, caplog.text, *capfd.readouterr()])
    assert len(told) == 6
    for secret in (SECRET, MEANT, "s3cr3t", "tokenvalue"):
        assert [text for text in told if secret in text] == [] and secret not in said
    assert f"{url.split('://')[0]}://" in said


def test_a_url_is_whole_for_who_opens_it_and_safe_for_who_reads_it() -> None:
    url = place_of("memory://user:password@run")
    assert os.fspath(url / "a") == "memory://user:password@run/a"  # type: ignore[operator]
    assert str(url / "a") == "memory://***@run/a" and repr(url) == "Url('memory://***@run')"


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://KEY:SEC/RET@bucket/run", "s3://***@bucket/run"),
        ("ftp://user:pw@host:21/run", "ftp://***@host:21/run"),
        ("ftp://user:p@ss?w#rd@host/run", "ftp://***@host/run"),
        ("ftp://user:p@s/s@host/run", "ftp://***@host/run"),
        ("ftp://host:21/run@v2", "ftp://host:21/run@v2"),
        ("ftp://user:12345@host/run", "ftp://***@host/run"),
        ("https://TOKEN@host/run", "https://***@host/run"),
        ("https://host/run?X-Amz-Signature=ab%2Fcd&part=1", "https://host/run?X-Amz-Signature=***&part=***"),
        ("simplecache::ftp://user:pw@host/run", "simplecache::ftp://***@host/run"),
        ("abfs://container@account.dfs.core.windows.net/run", "abfs://container@account.dfs.core.windows.net/run"),
        ("sftp://me@host/run", "sftp://me@host/run"),
        ("hf://datasets/me/run@main", "hf://datasets/me/run@main"),
        ("/a:b@c?d=e", "/a:b@c?d=e"),
    ],
)
def test_what_is_shown_of_a_url(url: str, safe: str) -> None:
    assert shown(url) == safe


def test_a_url_with_a_password_is_saved_to_and_loaded_from() -> None:
    model, optimizer, _ = make(0)
    path = save("memory://user:password@with_password", model, optimizer, step=1)
    assert str(path) == "memory://***@with_password/step-000000000001"
    assert load(path, model, optimizer).step == load("memory://user:password@with_password", model, optimizer).step == 1
    assert (path / NAME).is_file()
