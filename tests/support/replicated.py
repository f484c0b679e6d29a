"""One shard on several replicating servers, each behind a proxy: asynchronous replicas of either vendor, or a MySQL
replication group, if need be in network namespaces of its own, so that members can be cut off from each other."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pymysql
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter, RouterConfig, load
from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.testing import process
from lockrouter.testing.binaries import Program, Vendor, find
from lockrouter.testing.server import ADMIN, Option, Server, connect, free_port, prepare
from lockrouter.testing.shardfiles import APPLICATION, Scalar, ShardFile
from tests.support.observe import eventually
from tests.support.proxy import Proxy

__all__ = ["Group", "Member", "Replicas", "Replicated", "network"]

_PASSWORD = "only-on-loopback"
APPLICATION_PASSWORD = "application"
_SHAPE: dict[str, Scalar] = {"name": "replicated", "tables": 2, "buckets": 8, "rows_per_bucket": 64}


class Member:
    """One server of the shard, and the proxy that clients reach it through."""

    def __init__(self, folder: Path, program: Program, options: Mapping[str, Option], prefix: tuple[str, ...]) -> None:
        self.program = program
        self.options = options
        self._prefix = prefix
        self.server = Server(folder.name, str(folder), str(folder / "s"), int(str(options["port"])))
        prepare(self.server, program, _PASSWORD)
        self.start()
        self.server.first_statements.unlink()
        # What runs in a network of its own is reached through its socket.
        self.proxy = Proxy(self.server.socket if prefix else self.server.port)

    def start(self) -> None:
        """The server answers."""
        for path in (self.server.socket, f"{self.server.socket}.lock"):
            Path(path).unlink(missing_ok=True)
        argv = [*self._prefix, *self.program.argv, *self.server.options(self.program, self.options)]
        self.server.pid = process.spawn(argv, self.server.log)
        self.server.known = process.identity(self.server.pid)
        eventually(self._answers, 60.0, lambda: self.server.log.read_text("utf-8", "replace")[-2000:])

    def _answers(self) -> bool:
        if not Path(self.server.socket).exists():
            return False  # PyMySQL leaves its own socket open where it could not connect
        with contextlib.suppress(pymysql.err.MySQLError):
            return bool(self.sql("SELECT 1"))
        return False

    def greet(self) -> None:
        """The application's user has logged in once: only then may it do so by the proxy to the socket.

        The server takes that for a secure connection and would have the password in clear, the client would not.
        """
        # Asked first: PyMySQL leaves its own socket open where it may not log in.
        eventually(lambda: self.sql(f"SELECT 1 FROM mysql.user WHERE user = '{APPLICATION}' AND host = 'localhost'"))
        options: dict[str, Any] = {"user": APPLICATION, "password": APPLICATION_PASSWORD}
        pymysql.connect(**options, unix_socket=self.server.socket).close()

    def kill(self) -> None:
        """The server is dead, as by a crash."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        assert self.server.pid is not None
        assert process.wait_gone(self.server.pid, str(self.server.known), 30.0)

    def send(self, number: signal.Signals) -> None:
        """The server's process gets a signal."""
        if self.server.pid is not None and self.server.known is not None:
            process.send(self.server.pid, self.server.known, number)

    def sql(self, *statements: str, **options: Any) -> list[tuple[Any, ...]]:
        """Execute as administrator, and return the last one's rows."""
        with self.connect(**options) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def connect(self, **options: Any) -> pymysql.connections.Connection[Any]:
        """A new administrator's connection, past the proxy."""
        return connect(self.server, _PASSWORD, unix_socket=self.server.socket, **options)

    def ask(self, statement: str) -> Any:
        """The first value of the first row, from the shard's database."""
        return self.sql(statement, database="locks_0")[0][0]

    @property
    def read_only(self) -> bool:
        """Whether it refuses the writes of ordinary users."""
        return str(self.sql("SELECT @@global.read_only")[0][0]) in ("1", "ON")

    def close(self) -> None:
        """Nothing of it is left."""
        self.proxy.close()
        self.kill()


class Replicated:
    """What both kinds have in common: members, the shard's configuration with all of them as hosts, and routers."""

    def __init__(self, folder: Path, vendor: Vendor, count: int, net: Network | None = None) -> None:
        self.vendor = vendor
        self.folder = folder
        self.net = net
        program = find(vendor)
        ports: set[int] = set()
        self.ports = [free_port(ports) for _ in range(count)]
        self.inner_ports = [free_port(ports) for _ in range(count)]
        self.members: list[Member] = []
        self._made: list[LockRouter] = []
        folder.mkdir(exist_ok=True)
        try:
            for index in range(count):
                prefix = () if net is None else net.prefix(index)
                options = {**self.member_options(index), "port": self.ports[index], "server-id": index + 1}
                self.members.append(Member(folder / f"m{index}", program, options, prefix))
            self.replicate()
            self.config, self.admin = self._file(APPLICATION, APPLICATION_PASSWORD), self._file(ADMIN, _PASSWORD)
            self.file, self.admin_file = folder / f"{APPLICATION}.toml", folder / f"{ADMIN}.toml"
            init(self.config, self.admin)
            seed(self.config, self.admin)
            self.greet()
        except BaseException:
            self.close()
            raise

    def greet(self) -> None:
        """The application's user can log in at every member, through the proxies."""
        for member in self.members if self.net is not None else []:
            member.greet()

    def _file(self, user: str, password: str) -> RouterConfig:
        shape = ShardFile(1, topology=_SHAPE, router={"on_outage": "local"}, extra="", prefix="locks_")
        text = shape.text([("shard-0", 1)], user, password)
        hosts = "&".join(f"host=127.0.0.1:{member.proxy.port}" for member in self.members)
        path = self.folder / f"{user}.toml"
        path.write_text(text.replace("@127.0.0.1:1/locks_0", f"@/locks_0?{hosts}"), "utf-8")
        return load(path)

    def host(self, index: int) -> str:
        """The address at which the other members reach it."""
        return "127.0.0.1" if self.net is None else self.net.address(index)

    def member_options(self, index: int) -> dict[str, Option]:
        """The options of a member over the usual ones."""
        return {
            "log-bin": "binlog",
            "bind-address": "127.0.0.1" if self.net is None else "0.0.0.0",
            "report-host": self.host(index),
            # Many servers on one machine use up what the kernel has for it.
            "innodb-use-native-aio": "OFF",
        }

    def replicate(self) -> None:
        """The members replicate; the first one is writable."""
        raise NotImplementedError

    def router(self, hosts: list[int] | None = None, **changes: Mapping[str, Any]) -> LockRouter:
        """A router on the shard, with some fields of the file changed; `hosts` are the members that it knows of."""
        replace, config = msgspec.structs.replace, self.config
        if hosts is not None:
            listed = "&".join(f"host=127.0.0.1:{self.members[index].proxy.port}" for index in hosts)
            shard = config.shards[0]
            config = replace(config, shards=(replace(shard, url=shard.url.split("?")[0] + "?" + listed),))
        changed = {part: replace(getattr(config, part), **fields) for part, fields in changes.items()}
        made = LockRouter(replace(config, **changed), registry=CollectorRegistry())
        self._made.append(made)
        return made

    def close_routers(self) -> None:
        """Every router is closed, whatever its holders do."""
        while self._made:
            self._made.pop().close()

    def close(self) -> None:
        """Nothing is left of it."""
        self.close_routers()
        for member in self.members:
            member.close()


class Replicas(Replicated):
    """Two servers, one an asynchronous replica of the other, by global transaction ids."""

    primary = 0

    def member_options(self, index: int) -> dict[str, Option]:
        own: dict[str, Option] = (
            {"gtid-mode": "ON", "enforce-gtid-consistency": "ON"}
            if self.vendor is Vendor.MYSQL
            else {"log-slave-updates": True, "gtid-domain-id": 1, "gtid-ignore-duplicates": "ON"}
        )
        return {**super().member_options(index), **own}

    def replicate(self) -> None:
        for member in self.members:
            if self.vendor is Vendor.MYSQL:
                member.sql("RESET BINARY LOGS AND GTIDS")
            else:
                member.sql("RESET MASTER", "SET GLOBAL gtid_slave_pos = ''")
        self.primary = 0
        self.follow(1, 0)

    def follow(self, replica: int, source: int) -> None:
        """One server is read-only and replicates from another."""
        port, member = self.ports[source], self.members[replica]
        member.sql("SET GLOBAL read_only = 1")
        if self.vendor is Vendor.MYSQL:
            member.sql(
                f"CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {port},"
                f" SOURCE_USER = '{ADMIN}', SOURCE_PASSWORD = '{_PASSWORD}', SOURCE_AUTO_POSITION = 1,"
                " GET_SOURCE_PUBLIC_KEY = 1, SOURCE_CONNECT_RETRY = 1",
                "START REPLICA",
            )
        else:
            member.sql(
                f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = '{ADMIN}',"
                f" MASTER_PASSWORD = '{_PASSWORD}', MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
                "START SLAVE",
            )

    def stop_following(self, index: int) -> None:
        """The server replicates from nobody any more."""
        self.members[index].sql(
            *(
                ["STOP REPLICA", "RESET REPLICA ALL"]
                if self.vendor is Vendor.MYSQL
                else ["STOP SLAVE", "RESET SLAVE ALL"]
            )
        )

    def semi_sync(self) -> None:
        """Lossless semi-synchronous replication that never gives up; the replica has acknowledged one commit."""
        mysql = self.vendor is Vendor.MYSQL
        source, replica = ("source", "replica") if mysql else ("master", "slave")
        source, replica = f"rpl_semi_sync_{source}", f"rpl_semi_sync_{replica}"
        if mysql:
            for member in self.members:
                if not member.sql("SHOW GLOBAL VARIABLES LIKE 'rpl_semi_sync_source_enabled'"):
                    member.sql("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
                    member.sql("INSTALL PLUGIN rpl_semi_sync_replica SONAME 'semisync_replica.so'")
        stop, start = ("STOP REPLICA", "START REPLICA") if mysql else ("STOP SLAVE", "START SLAVE")
        self.members[1].sql(stop, f"SET GLOBAL {replica}_enabled = 1", start)
        self.members[0].sql(
            f"SET GLOBAL {source}_timeout = 3600000",
            f"SET GLOBAL {source}_wait_point = 'AFTER_SYNC'",
            f"SET GLOBAL {source}_enabled = 1",
        )
        eventually(lambda: self.members[0].sql(f"SHOW STATUS LIKE '{source}_clients'")[0][1] == "1")

    def caught_up(self) -> bool:
        """Whether the replica has all that the primary had just now."""
        source, replica = self.members[self.primary], self.members[1 - self.primary]
        if self.vendor is Vendor.MYSQL:
            done = source.sql("SELECT @@global.gtid_executed")[0][0]
            return bool(replica.sql(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{done}', 20)")[0][0] == 0)
        done = source.sql("SELECT @@global.gtid_binlog_pos")[0][0]
        return bool(replica.sql(f"SELECT MASTER_GTID_WAIT('{done}', 20)")[0][0] == 0)

    def demote(self) -> None:
        """The primary is read-only, and the replica has all it had."""
        self.members[self.primary].sql("SET GLOBAL read_only = 1")
        assert self.caught_up()

    def promote(self) -> None:
        """The other server is the writable one; the old primary is left as it is."""
        self.primary = 1 - self.primary
        self.stop_following(self.primary)
        self.members[self.primary].sql("SET GLOBAL read_only = 0")

    def mend(self) -> None:
        """The first server is the primary, the second follows it, no lease is left; every proxy passes everything."""
        for member in self.members:
            member.proxy.accept()
            member.send(signal.SIGCONT)
            if process.identity(member.server.pid or 0) != member.server.known:
                member.start()
        term = max(member.ask("SELECT term FROM lock_meta") for member in self.members)
        for index, member in enumerate(self.members):
            self.stop_following(index)
            member.sql(
                "SET GLOBAL read_only = 0",
                f"UPDATE lock_meta SET term = {term}, drained = ''",
                "DELETE FROM lease_00",
                "DELETE FROM lease_01",
                database="locks_0",
            )
        self.replicate()


class Group(Replicated):
    """A MySQL replication group with a single primary, three members."""

    def __init__(self, folder: Path, net: Network | None = None) -> None:
        self._name = str(uuid.uuid4())
        super().__init__(folder, Vendor.MYSQL, 3, net)

    def member_options(self, index: int) -> dict[str, Option]:
        seeds = ",".join(f"{self.host(each)}:{port}" for each, port in enumerate(self.inner_ports))
        return {
            **super().member_options(index),
            "gtid-mode": "ON",
            "enforce-gtid-consistency": "ON",
            "plugin-load-add": "group_replication.so",
            "group-replication-group-name": self._name,
            "group-replication-start-on-boot": "OFF",
            "group-replication-local-address": f"{self.host(index)}:{self.inner_ports[index]}",
            "group-replication-group-seeds": seeds,
            "group-replication-ip-allowlist": "127.0.0.0/8,10.0.0.0/8",
            "group-replication-recovery-get-public-key": "ON",
            "group-replication-member-expel-timeout": 0,
            "group-replication-autorejoin-tries": 0,
            "group-replication-exit-state-action": "READ_ONLY",
        }

    def replicate(self) -> None:
        for index, member in enumerate(self.members):
            member.sql("RESET BINARY LOGS AND GTIDS")
            self.join(index, first=index == 0)
        self.await_members(3)

    def join(self, index: int, *, first: bool = False) -> None:
        """The server is a member of the group; `first` founds it."""
        founding = f"SET GLOBAL group_replication_bootstrap_group = {'ON' if first else 'OFF'}"
        start = f"START GROUP_REPLICATION USER = '{ADMIN}', PASSWORD = '{_PASSWORD}'"
        self.members[index].sql(founding, start, "SET GLOBAL group_replication_bootstrap_group = OFF")

    def roles(self, index: int) -> dict[int, tuple[str, str]]:
        """Role and state of each member as one of them sees it, by its number."""
        rows = self.members[index].sql(
            "SELECT MEMBER_PORT, MEMBER_ROLE, MEMBER_STATE FROM performance_schema.replication_group_members"
        )
        return {self.ports.index(port): (role, state) for port, role, state in rows if port}

    def await_members(self, count: int, index: int = 0, seconds: float = 60.0) -> None:
        """So many members are online, as one of them sees it."""
        eventually(lambda: self.online(index) == count, seconds, lambda: self.roles(index))

    def online(self, index: int) -> int:
        """How many members are online, as one of them sees it."""
        return sum(state == "ONLINE" for _, state in self.roles(index).values())

    def primary(self, index: int = 0) -> int | None:
        """The primary as one of the members sees it."""
        return next((each for each, role in self.roles(index).items() if role == ("PRIMARY", "ONLINE")), None)

    def switch(self, to: int) -> None:
        """A planned switchover."""
        member = self.members[to]
        name = member.sql("SELECT @@server_uuid")[0][0]
        member.sql(f"SELECT group_replication_set_as_primary('{name}')")

    def mend(self) -> None:
        """All three are online, and every proxy passes everything; whoever is the primary stays it."""
        if self.net is not None:
            for index in range(3):
                self.net.connect(index)
        for member in self.members:
            member.proxy.accept()
            member.send(signal.SIGCONT)
            if process.identity(member.server.pid or 0) != member.server.known:
                member.start()
        alive = next(
            index
            for index in range(3)
            if sum(state == "ONLINE" for _, state in self.roles(index).values()) >= 2
            and self.primary(index) is not None
        )
        for index, member in enumerate(self.members):
            if self.roles(alive).get(index, ("", ""))[1] != "ONLINE":
                member.sql("STOP GROUP_REPLICATION")
                self.join(index)
        self.await_members(3, alive)
        self.greet()


class Network:
    """Namespaces, one per member, whose links to a common bridge can be cut; all inside one that nobody else sees."""

    def __init__(self, count: int) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            self._hub = self._hold("unshare", "--user", "--map-root-user", "--net")
            self._run(self._hub, "ip link add bridge type bridge", "ip link set bridge up")
            self._members = [self._member(index) for index in range(count)]
        except BaseException:
            self.close()
            raise

    def _hold(self, *command: str) -> int:
        holder = subprocess.Popen([*command, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.read(1) == b"\n", "no network namespace could be made"
        return holder.pid

    def _enter(self, pid: int) -> list[str]:
        return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]

    def _run(self, pid: int, *commands: str) -> None:
        for command in commands:
            subprocess.run([*self._enter(pid), *command.split()], check=True, capture_output=True)

    def _member(self, index: int) -> int:
        pid = self._hold(*self._enter(self._hub), "unshare", "--net")
        self._run(
            self._hub,
            f"ip link add link{index} type veth peer name inner netns {pid}",
            f"ip link set link{index} master bridge up",
        )
        self._run(
            pid, "ip link set lo up", f"ip address add {self.address(index)}/24 dev inner", "ip link set inner up"
        )
        return pid

    def address(self, index: int) -> str:
        """A member's address among the others."""
        return f"10.77.0.{index + 1}"

    def prefix(self, index: int) -> tuple[str, ...]:
        """What a command line begins with to run as a member."""
        return ("/usr/bin/env", *self._enter(self._members[index]))

    def cut(self, index: int) -> None:
        """Nothing passes between this member and the others; clients reach it as before."""
        self._run(self._hub, f"ip link set link{index} down")

    def connect(self, index: int) -> None:
        """It passes again."""
        self._run(self._hub, f"ip link set link{index} up")

    def close(self) -> None:
        """The namespaces are gone, as soon as nobody runs in them."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """A network for so many members while the block runs."""
    net = Network(count)
    try:
        yield net
    finally:
        net.close()
