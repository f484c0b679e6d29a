"""Debian packages as plain folders: resolved, downloaded and unpacked by the machine's own apt, without root.

apt works in a private root (its own settings, state and cache), so what is installed neither counts nor
changes. Where packages come from, through which proxy, and whose keys vouch for them, the machine's own apt says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AptError", "Source", "distribution", "main", "own_source", "parse_deb822", "parse_one_line", "unpack"]

_INHERITED = re.compile(r"^Acquire::(?!IndexTargets|Languages|Changelogs|cdrom)\S+ \"[^\"]+\";$")
_ROLLING = ("sid", "unstable", "testing", "stable", "oldstable")
_USELESS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian")


class AptError(RuntimeError):
    """apt is missing, has no source of the distribution's own packages, or failed; carries the end of its output."""


@dataclass(frozen=True)
class Source:
    """One place where packages come from, as apt's lists name it."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    """A keyring's path, a fingerprint, or an armoured key; empty: apt's trusted keys."""

    def stanza(self, suite: str) -> str:
        """This source for another suite, in deb822 form."""
        lines = ["Types: deb", f"URIs: {self.uri}", f"Suites: {suite}", f"Components: {' '.join(self.components)}"]
        if self.signed_by:
            block = "\n".join(f" {line.strip() or '.'}" for line in self.signed_by.splitlines())
            lines.append("Signed-By:" + (block if "\n" not in self.signed_by else "\n" + block))
        return "\n".join(lines) + "\n"


def parse_one_line(text: str) -> Iterator[Source]:
    """The binary sources of a `sources.list`; comments, `deb-src` and malformed lines are passed over."""
    pattern = re.compile(
        r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>(?:\s+\S+)*)$"
    )
    for line in text.splitlines():
        if found := pattern.match(line.partition("#")[0].strip()):
            options = dict(part.partition("=")[::2] for part in (found["options"] or "").split())
            yield Source(
                found["uri"], (found["suite"],), tuple(found["components"].split()), options.get("signed-by", "")
            )


def parse_deb822(text: str) -> Iterator[Source]:
    """The enabled binary sources of a `.sources` file, one per URI."""
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        fields = _fields(stanza)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        for uri in fields.get("uris", "").split():
            suites, components = fields.get("suites", "").split(), fields.get("components", "").split()
            yield Source(uri, tuple(suites), tuple(components), fields.get("signed-by", ""))


def _fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line[:1] in (" ", "\t"):
            fields[name] = f"{fields.get(name, '')}\n{line.strip()}".strip("\n")
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


def own_source(sources: Sequence[Source], vendor: str, codename: str) -> tuple[Source, str]:
    """The source of the distribution's own `main` packages, and the machine's suite in it.

    Third parties use the same suite names, so what also marks the distribution decides: its keyring, an update suite
    beside the suite, the last part of the address, and at last the order of the lists.

    Raises:
        AptError: there is none.
    """
    updated = {source.uri for source in sources for suite in source.suites if suite.endswith("-updates")}
    best: tuple[int, Source, str] | None = None
    for source in sources:
        suite = next((name for name in (codename, *_ROLLING) if name in source.suites), None)
        if suite is None or "main" not in source.components or source.uri.startswith("cdrom:"):
            continue
        points = 4 * (f"{vendor}-archive" in source.signed_by) + 2 * (source.uri in updated)
        points += source.uri.rstrip("/").rsplit("/", 1)[-1] in (vendor, f"{vendor}-ports")
        if best is None or points > best[0]:
            best = (points, source, suite)
    if best is None:
        raise AptError(f"apt's lists name no source of {vendor} {codename}'s main packages")
    return best[1], best[2]


def distribution() -> tuple[str, str] | None:
    """The names of the distribution and its release where it is Debian or Ubuntu with apt, else None."""
    path = Path("/etc/os-release")
    if not path.is_file() or not (shutil.which("apt-get") and shutil.which("dpkg")):
        return None
    release = dict(line.partition("=")[::2] for line in path.read_text("utf-8").splitlines())
    vendor = release.get("ID", "").strip('"')
    return (vendor, release.get("VERSION_CODENAME", "").strip('"')) if vendor in ("debian", "ubuntu") else None


def unpack(package: str, target: Path, *, suite: str | None = None, extra: Sequence[str] = ()) -> None:
    """Leave `package`, everything it depends on and `extra` in the folder `target`, which must not exist.

    Only one caller at a time may work for a target; what one that was killed left behind is replaced.

    Args:
        package: a name, or the beginning of a versioned one: `x` also finds `x-9.7`, and the highest of them.
        suite: of the distribution; by default the machine's own.

    Raises:
        AptError: see there.
    """
    where = distribution()
    if where is None:
        raise AptError("this is neither Debian nor Ubuntu, or apt-get and dpkg are missing")
    source, own = own_source(_machine_sources(), *where)
    root = target.with_name(f".{target.name}.apt")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, mode=0o700)
    try:
        environment = _private_root(root, source.stanza(suite or own))
        _run(["apt-get", "update"], environment)
        found = _resolve(package, environment)
        _run(["apt-get", "install", "-y", "--no-install-recommends", "--download-only", found, *extra], environment)
        tree = root / "tree"
        for archive in sorted((root / "cache/archives").glob("*.deb")):
            _run(["dpkg", "-x", str(archive), str(tree)], environment)
        for useless in _USELESS:
            shutil.rmtree(tree / useless, ignore_errors=True)
        _keep_inside(tree)
        tree.rename(target)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _keep_inside(tree: Path) -> None:
    """Have links that name a place on the machine lead to the same place in the tree, where it is there."""
    for link in [path for path in tree.rglob("*") if path.is_symlink()]:
        place = str(link.readlink())
        inside = tree / place.lstrip("/")
        if place.startswith("/") and os.path.lexists(inside):
            link.unlink()
            link.symlink_to(os.path.relpath(inside, link.parent))


def _machine_sources() -> list[Source]:
    """What the machine's apt would read, in its order."""
    main = Path(_apt_path("Dir::Etc::sourcelist/f"))
    found = list(parse_one_line(main.read_text("utf-8"))) if main.is_file() else []
    parts = Path(_apt_path("Dir::Etc::sourceparts/d"))
    for path in sorted(parts.iterdir()) if parts.is_dir() else ():
        if path.suffix == ".list":
            found += parse_one_line(path.read_text("utf-8"))
        elif path.suffix == ".sources":
            found += parse_deb822(path.read_text("utf-8"))
    return found


def _apt_path(name: str) -> str:
    assignment = _run(["apt-config", "shell", "VALUE", name], None).strip()
    return "".join(shlex.split(assignment.partition("=")[2]))


def _private_root(root: Path, stanza: str) -> dict[str, str]:
    """Lay out an apt root in the folder `root`; answers the environment that makes apt use it."""
    for folder in ("etc/apt.conf.d", "etc/preferences.d", "etc/sources.list.d", "state/lists/partial"):
        (root / folder).mkdir(parents=True)
    (root / "cache/archives/partial").mkdir(parents=True)
    (root / "state/status").touch()
    (root / "etc/sources.list.d/own.sources").write_text(stanza, "utf-8")
    settings = {
        "Dir::Etc": root / "etc",
        "Dir::State": root / "state",
        "Dir::State::status": root / "state/status",
        "Dir::Cache": root / "cache",
        "Dir::Log": root / "state",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    for name in ("netrc/f", "netrcparts/d", "trusted/f", "trustedparts/d"):
        settings[f"Dir::Etc::{name[:-2]}"] = _apt_path(f"Dir::Etc::{name}")
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    lines += [line for line in _run(["apt-config", "dump"], None).splitlines() if _INHERITED.match(line)]
    (root / "apt.conf").write_text("\n".join(lines) + "\n", "utf-8")
    return {**os.environ, "APT_CONFIG": str(root / "apt.conf"), "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _resolve(package: str, environment: dict[str, str]) -> str:
    names = _run(["apt-cache", "pkgnames", package], environment).split()
    versioned = [name for name in names if re.fullmatch(re.escape(package) + r"-[\d.]+", name)]
    versioned.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name[len(package) :])])
    for name in ([package] if package in names else []) + versioned[::-1]:
        policy = _run(["apt-cache", "policy", name], environment)
        if (candidate := re.search(r"Candidate: (\S+)", policy)) and candidate[1] != "(none)":
            return name
    raise AptError(f"the distribution has no package {package}")


def _run(command: Sequence[str], environment: dict[str, str] | None) -> str:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AptError(f"{' '.join(command[:2])} failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """`python apt.py PACKAGE FOLDER`: unpack once; works from the bare file, with nothing but Python installed."""
    package, folder = arguments
    if not Path(folder).exists():
        try:
            unpack(package, Path(folder).absolute())
        except AptError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
