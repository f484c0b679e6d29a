"""Where packages come from is read right from every way apt's lists are written, and programs are found in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockrouter.testing import apt, binaries
from lockrouter.testing.apt import AptError, Source, own_source, parse_deb822, parse_one_line
from lockrouter.testing.binaries import ProgramError, Vendor

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def test_one_line_format() -> None:
    text = """
        # deb http://commented.test/debian bookworm main
        deb http://mirror.test/debian bookworm main contrib  # the main one
        deb-src http://mirror.test/debian bookworm main
        deb [arch=amd64 signed-by=/keys/a.gpg] https://other.test/apt stable main
        deb [ trusted=yes ] mirror+file:/etc/apt/mirrors.list bookworm-updates main
        deb http://flat.test/repo ./
        deb
        nonsense
    """
    assert list(parse_one_line(text)) == [
        Source("http://mirror.test/debian", ("bookworm",), ("main", "contrib")),
        Source("https://other.test/apt", ("stable",), ("main",), "/keys/a.gpg"),
        Source("mirror+file:/etc/apt/mirrors.list", ("bookworm-updates",), ("main",)),
        Source("http://flat.test/repo", ("./",), ()),
    ]


def test_deb822_format() -> None:
    text = f"""# a comment
Types: deb deb-src
URIs: http://mirror.test/debian
  http://second.test/debian
# a comment inside
Suites: bookworm bookworm-updates
Components: main
Signed-By: {KEYRING}

types: deb
uris: http://off.test/debian
suites: bookworm
components: main
Enabled: no

Types: deb-src
URIs: http://source.test/debian
Suites: bookworm
Components: main
"""
    both = ("bookworm", "bookworm-updates")
    assert list(parse_deb822(text)) == [
        Source("http://mirror.test/debian", both, ("main",), KEYRING),
        Source("http://second.test/debian", both, ("main",), KEYRING),
    ]


def test_embedded_key_survives_another_suite() -> None:
    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n.\nabc=\n-----END PGP PUBLIC KEY BLOCK-----"
    written = Source("http://mirror.test/debian", ("bookworm",), ("main",), key).stanza("sid")
    (read,) = parse_deb822(written)
    assert read == Source("http://mirror.test/debian", ("sid",), ("main",), key)


@pytest.mark.parametrize("signed_by", ["", KEYRING])
def test_stanza_reads_back(signed_by: str) -> None:
    source = Source("http://mirror.test/debian", ("sid",), ("main", "contrib"), signed_by)
    assert list(parse_deb822(source.stanza("sid"))) == [source]


def test_third_parties_with_the_same_suite_name_are_passed_over() -> None:
    third = Source("https://vendor.test/stable/debian", ("bookworm",), ("main",), "/keys/vendor.gpg")
    own = Source("http://mirror.test/debian", ("bookworm", "bookworm-updates"), ("main",), KEYRING)
    security = Source("http://mirror.test/debian-security", ("bookworm-security",), ("main",), KEYRING)
    assert own_source([third, security, own], "debian", "bookworm") == (own, "bookworm")
    unsigned = Source("http://mirror.test/debian", ("bookworm",), ("main",))
    updates = Source("http://mirror.test/debian", ("bookworm-updates",), ("main",))
    assert own_source([third, unsigned, updates], "debian", "bookworm") == (unsigned, "bookworm")


def test_rolling_suite() -> None:
    source = Source("http://mirror.test/debian", ("unstable",), ("main",), KEYRING)
    assert own_source([source], "debian", "forky") == (source, "unstable")


@pytest.mark.parametrize(
    "source",
    [
        Source("http://mirror.test/debian", ("bookworm-security",), ("main",), KEYRING),
        Source("http://mirror.test/debian", ("bookworm",), ("contrib",), KEYRING),
        Source("cdrom:[Debian 12]/", ("bookworm",), ("main",)),
    ],
)
def test_no_own_source_is_said(source: Source) -> None:
    with pytest.raises(AptError, match="debian bookworm"):
        own_source([source], "debian", "bookworm")


def test_environment_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mysqld"
    program.write_text("#!/bin/sh\necho 'mysqld  Ver 8.4.3 for Linux on x86_64 (Source distribution)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("LOCKROUTER_MYSQLD", str(program))
    found = binaries.find("mysql")
    assert (found.argv, found.version, found.layout) == ((str(program),), "8.4.3", {})
    monkeypatch.setenv("LOCKROUTER_MARIADBD", str(program))
    with pytest.raises(ProgramError, match="not mariadb: name the right program in LOCKROUTER_MARIADBD"):
        binaries.find(Vendor.MARIADB)


def test_environment_variable_that_names_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "absent"):
        monkeypatch.setenv("LOCKROUTER_MYSQLD", str(wrong))
        with pytest.raises(ProgramError, match="LOCKROUTER_MYSQLD"):
            binaries.find("mysql")


def test_elsewhere_the_path_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(apt, "distribution", lambda: None)
    monkeypatch.setenv("LOCKROUTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("LOCKROUTER_MARIADBD", raising=False)
    program = tmp_path / "mariadbd"
    program.write_text("#!/bin/sh\necho 'mariadbd  Ver 11.8.2-MariaDB for osx10.20 on arm64 (Homebrew)'\n")
    program.chmod(0o755)
    assert binaries.find("mariadb").version == "11.8.2-MariaDB"
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramError, match="install MariaDB"):
        binaries.find("mariadb")


def test_two_at_once_unpack_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second waits for the first, and a folder that is there is always whole."""
    monkeypatch.setenv("LOCKROUTER_CACHE", str(tmp_path))
    monkeypatch.delenv("LOCKROUTER_MYSQLD", raising=False)
    monkeypatch.setattr(apt, "distribution", lambda: ("debian", "bookworm"))
    unpacked: list[str] = []

    def unpack(package: str, target: Path, *, suite: str | None, extra: Sequence[str]) -> None:
        unpacked.append(f"{package} {suite}")
        (target / "usr/sbin").mkdir(parents=True)
        (target / "lib/some-linux-gnu").mkdir(parents=True)
        loader = target / "lib/some-linux-gnu/ld-linux-some.so.2"
        loader.write_text("#!/bin/sh\necho 'Ver 9.7.4'\n")
        loader.chmod(0o755)
        (target / "usr/sbin/mysqld").touch()

    monkeypatch.setattr(apt, "unpack", unpack)
    found: list[binaries.Program] = []
    threads = [threading.Thread(target=lambda: found.append(binaries.find("mysql"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unpacked == ["mysql-server-core sid"]
    assert len(found) == 4 and len(set(found)) == 1
    assert found[0].version == "9.7.4"
    assert found[0].argv[-1] == str(tmp_path / "servers/mysql/usr/sbin/mysqld")


def test_links_stay_in_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc/java").mkdir(parents=True)
    (tree / "etc/java/security").write_text("inside", "utf-8")
    (tree / "usr/lib/conf").mkdir(parents=True)
    (tree / "usr/lib/conf/security").symlink_to("/etc/java/security")
    (tree / "usr/lib/conf/elsewhere").symlink_to("/nowhere/at/all")
    apt._keep_inside(tree)
    moved = tree.rename(tmp_path / "moved")
    assert (moved / "usr/lib/conf/security").read_text("utf-8") == "inside"
    assert (moved / "usr/lib/conf/elsewhere").readlink() == Path("/nowhere/at/all")
