"""The statements of running routers, one `Dialect` per vendor, as bytes ready for the wire.

Every value here is an integer, a hexadecimal string made by this package, or a literal; nothing is quoted user input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockrouter.protocol.packets import Reply, Rows, query

__all__ = ["MARIADB", "MYSQL", "Dialect", "bucket_state", "dialect_of", "read_bucket"]

_CHECK_COLUMNS = b"UNIX_TIMESTAMP(SYSDATE(6)), @@global.read_only"
_GRANT_COLUMNS = b"slot, epoch, " + _CHECK_COLUMNS
_META = (
    "m.topology, m.protocol, m.fingerprint, m.epoch, m.term, m.term_identity, m.server_started, m.clock_high, m.drained"
)

MAX_STATEMENT_WAIT = 30.0
"""Seconds one locking statement waits at most; longer waits repeat it. Below `innodb_lock_wait_timeout` (31 s)."""


_MAX_HEADS = 4096


def _bound_ms(seconds: float) -> int:
    """The server's bound in milliseconds: never 0 (which would mean none), never above what both servers honour."""
    if 0.001 <= seconds <= MAX_STATEMENT_WAIT:
        return int(seconds * 1000)
    return 1 if seconds < 0.001 else int(MAX_STATEMENT_WAIT * 1000)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one vendor spells what both can do."""

    name: str
    lock_form: bytes
    lock_tail: bytes
    share_form: bytes
    share_tail: bytes
    try_form: bytes
    try_tail: bytes
    try_share_form: bytes
    try_share_tail: bytes
    busy_codes: frozenset[int]
    bound_code: int
    row_session: str
    control_session: str
    transaction_session: str
    bound_form: bytes
    utc_form: tuple[bytes, bytes]
    check_form: bytes
    prepared_count: str
    identity: str
    uptime: str
    roles: str
    _heads: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)

    def lock(self, table: int, slot: int, seconds: float, tag: bytes, shared: bool = False) -> bytes:
        """The packet that waits for a row at most `seconds` (1 ms to 30 s) on the server; `tag` is 16 bytes long."""
        bound = int(seconds * 1000) if 0.001 <= seconds <= MAX_STATEMENT_WAIT else _bound_ms(seconds)
        place = (bound << 8 | table) << 1 | shared
        head = self._heads.get(place)
        if head is None:
            head = self._head((self.share_form if shared else self.lock_form) % (bound, table), place, shared)
        return b"%b%10d%b /* %b */" % (head, slot, self.share_tail if shared else self.lock_tail, tag)

    @property
    def lock_text(self) -> str:
        """The locking statement as a format of milliseconds, table, slot and tag: what other clients send for it."""
        return (self.lock_form + b"%10d" + self.lock_tail + b" /* %s */").decode("ascii")

    def prepared_lock(self, table: int) -> bytes:
        """The text of a table's locking statement for any slot; it waits for as long as `bind` has said."""
        return b"SELECT " + _GRANT_COLUMNS + b" FROM lock_%02d WHERE slot = ? FOR UPDATE" % table

    def in_utc(self, statement: bytes) -> bytes:
        """A locking statement for a session of any time zone: in some an hour of each year comes twice."""
        return statement.replace(*self.utc_form, 1)

    def bind(self, bound_ms: int) -> bytes:
        """The packet that bounds every later statement of a session that has no bound of its own."""
        return query(self.bound_form % bound_ms)

    def check(self) -> bytes:
        """The packet that proves, by IN_TRANS in its reply, that the session's transaction is alive, and reads the
        server's clock and role again.
        """
        return query(self.check_form)

    def try_lock(self, table: int, slot: int, tag: bytes, shared: bool = False) -> bytes:
        """The packet that takes a row at once or says busy; a metadata lock ends it after 50 ms."""
        form, tail = (self.try_share_form, self.try_share_tail) if shared else (self.try_form, self.try_tail)
        return query(b"%b%10d%b /* %b */" % (form % table, slot, tail, tag))

    def _head(self, sql: bytes, place: int, shared: bool) -> bytes:
        """Everything before the slot, the packet's header included: slots and tags are of one length."""
        if len(self._heads) > _MAX_HEADS:
            self._heads.clear()
        whole = query(b"%b%10d%b /* %16s */" % (sql, 0, self.share_tail if shared else self.lock_tail, b""))
        head = self._heads[place] = whole[: 5 + len(sql)]
        return head

    def session_setup(self, ghost_timeout: int) -> bytes:
        """The packet that makes a fresh connection one for row locks."""
        return query(self.row_session.format(ghost=ghost_timeout).encode())

    def control_setup(self, ghost_timeout: int) -> bytes:
        """The packet that makes a fresh connection one for reading, killing and the grant window."""
        return query(self.control_session.format(ghost=ghost_timeout).encode())

    def transaction_setup(self, isolation: str, time_zone: str, lock_wait: int, idle: int) -> bytes:
        """The packet that makes a fresh connection one for callers' transactions."""
        # The isolation's words and the zone's alphabet were checked with the shard file: nothing in them ends a string.
        values = {"isolation": isolation.replace(" ", "-"), "zone": time_zone, "wait": lock_wait, "idle": idle}
        return query(self.transaction_session.format(**values).encode())

    def whoami(self) -> bytes:
        """Connection id, server identity, start of the server, what the database says of the topology, and whether the
        server has more than half of its prepared statements left.
        """
        return query(
            f"SELECT CONNECTION_ID(), {self.identity}, UNIX_TIMESTAMP(NOW()) - {self.uptime}, m.protocol, "
            f"m.fingerprint, 2 * ({self.prepared_count}) < @@global.max_prepared_stmt_count FROM lock_meta m".encode()
        )

    def control_read(self) -> bytes:
        """One reading of the server's role, clock and right to grant."""
        roles = f", {self.roles}" if self.roles else ""
        return query(
            f"SELECT CONNECTION_ID(), {self.identity}, UNIX_TIMESTAMP(NOW()) - {self.uptime}, {_META}, "
            f"UNIX_TIMESTAMP(SYSDATE(6)), @@global.read_only{roles} FROM lock_meta m".encode()
        )


MYSQL = Dialect(
    name="mysql",
    lock_form=b"SELECT /*+ MAX_EXECUTION_TIME(%d) */ " + _GRANT_COLUMNS + b" FROM lock_%02d WHERE slot = ",
    lock_tail=b" FOR UPDATE",
    share_form=b"SELECT /*+ MAX_EXECUTION_TIME(%d) */ " + _GRANT_COLUMNS + b" FROM lock_%02d WHERE slot = ",
    share_tail=b" FOR SHARE",
    try_form=b"SELECT /*+ MAX_EXECUTION_TIME(50) */ " + _GRANT_COLUMNS + b" FROM lock_%02d WHERE slot = ",
    try_tail=b" FOR UPDATE NOWAIT",
    try_share_form=b"SELECT /*+ MAX_EXECUTION_TIME(50) */ " + _GRANT_COLUMNS + b" FROM lock_%02d WHERE slot = ",
    try_share_tail=b" FOR SHARE NOWAIT",
    busy_codes=frozenset({3572}),
    bound_code=3024,
    row_session="SET SESSION autocommit = 0, transaction_isolation = 'READ-COMMITTED', time_zone = '+00:00', "
    "lock_wait_timeout = 1, innodb_lock_wait_timeout = 31, wait_timeout = {ghost}",
    control_session="SET SESSION autocommit = 1, transaction_isolation = 'READ-COMMITTED', time_zone = '+00:00', "
    "lock_wait_timeout = 1, innodb_lock_wait_timeout = 1, wait_timeout = {ghost}",
    transaction_session="SET SESSION autocommit = 0, transaction_isolation = '{isolation}', time_zone = '{zone}', "
    "lock_wait_timeout = {wait}, innodb_lock_wait_timeout = {wait}, wait_timeout = {idle}",
    bound_form=b"SET SESSION max_execution_time = %d",
    utc_form=(b"/*+ ", b"/*+ SET_VAR(time_zone = '+00:00') "),
    check_form=b"SELECT /*+ MAX_EXECUTION_TIME(30000) */ " + _CHECK_COLUMNS,
    prepared_count="SELECT VARIABLE_VALUE FROM performance_schema.global_status "
    "WHERE VARIABLE_NAME = 'Prepared_stmt_count'",
    identity="@@server_uuid",
    uptime="(SELECT VARIABLE_VALUE FROM performance_schema.global_status WHERE VARIABLE_NAME = 'Uptime')",
    roles="@@global.super_read_only, @@global.innodb_read_only, "
    "(SELECT CONCAT(SUM(MEMBER_STATE = 'ONLINE'), ' ', COUNT(*), ' ', SUM(MEMBER_ROLE = 'PRIMARY'), ' ', "
    "MAX(IF(MEMBER_ID = @@server_uuid, CONCAT(MEMBER_ROLE, ' ', MEMBER_STATE), ''))) "
    "FROM performance_schema.replication_group_members WHERE MEMBER_ID <> '')",
)

MARIADB = Dialect(
    name="mariadb",
    lock_form=b"SET STATEMENT max_statement_time = %de-3 FOR SELECT "
    + _GRANT_COLUMNS
    + b" FROM lock_%02d WHERE slot = ",
    lock_tail=b" FOR UPDATE",
    share_form=b"SET STATEMENT max_statement_time = %de-3 FOR SELECT "
    + _GRANT_COLUMNS
    + b" FROM lock_%02d WHERE slot = ",
    share_tail=b" LOCK IN SHARE MODE",
    try_form=b"SET STATEMENT innodb_lock_wait_timeout = 0, max_statement_time = 0.05 FOR SELECT "
    + _GRANT_COLUMNS
    + b" FROM lock_%02d WHERE slot = ",
    try_tail=b" FOR UPDATE",
    try_share_form=b"SET STATEMENT innodb_lock_wait_timeout = 0, max_statement_time = 0.05 FOR SELECT "
    + _GRANT_COLUMNS
    + b" FROM lock_%02d WHERE slot = ",
    try_share_tail=b" LOCK IN SHARE MODE",
    busy_codes=frozenset({1205}),
    bound_code=1969,
    row_session="SET SESSION autocommit = 0, tx_isolation = 'READ-COMMITTED', time_zone = '+00:00', "
    "lock_wait_timeout = 1, innodb_lock_wait_timeout = 31, idle_transaction_timeout = {ghost}",
    control_session="SET SESSION autocommit = 1, tx_isolation = 'READ-COMMITTED', time_zone = '+00:00', "
    "lock_wait_timeout = 1, innodb_lock_wait_timeout = 1, wait_timeout = {ghost}",
    transaction_session="SET SESSION autocommit = 0, tx_isolation = '{isolation}', time_zone = '{zone}', "
    "lock_wait_timeout = {wait}, innodb_lock_wait_timeout = {wait}, idle_transaction_timeout = {idle}",
    bound_form=b"SET SESSION max_statement_time = %de-3",
    utc_form=(b"SET STATEMENT ", b"SET STATEMENT time_zone = '+00:00', "),
    check_form=b"SET STATEMENT max_statement_time = 30 FOR SELECT " + _CHECK_COLUMNS,
    prepared_count="SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS "
    "WHERE VARIABLE_NAME = 'PREPARED_STMT_COUNT'",
    identity="CONCAT(@@server_uid, ' ', @@server_id, ' ', @@hostname)",
    uptime="(SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'UPTIME')",
    roles="0, @@global.innodb_read_only, ''",
)


def dialect_of(server_version: str) -> Dialect:
    """Return the dialect of a server by the version string of its handshake."""
    return MARIADB if "mariadb" in server_version.lower() else MYSQL


SYSDATE_MOVES = query(b"SELECT SYSDATE(6), SLEEP(0.001), SYSDATE(6)")
"""The two clocks differ unless the server runs with --sysdate-is-now, whose clock is useless for tokens."""

WRITERS = query(
    b"SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode',"
    b" 'group_replication_group_name')"
)
"""The settings that make several servers writable at once; a vendor's or plug-in's missing ones are absent."""

MEMBER_STATE = query(
    b"SELECT MEMBER_STATE FROM performance_schema.replication_group_members WHERE MEMBER_ID = @@server_uuid"
)
"""What a server is in its replication group; no row, or OFFLINE: it has not joined it since it started."""

NOW_MICROS = b"CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"


def probe_table(dialect: Dialect, table: int) -> bytes:
    """The packet that reads nothing from a lock table within 20 ms unless a metadata lock holds it."""
    if dialect is MYSQL:
        return query(b"SELECT /*+ MAX_EXECUTION_TIME(20) */ 1 FROM lock_%02d WHERE slot = 4294967295" % table)
    return query(b"SET STATEMENT max_statement_time = 0.02 FOR SELECT 1 FROM lock_%02d WHERE slot = 4294967295" % table)


def renew_window(window_us: int, term: int, identity: bytes) -> bytes:
    """The packet that keeps `clock_high` ahead of the server's clock; changes nothing while it is far enough ahead.

    Nor does it once the server is drained, however late it comes.
    """
    return query(
        b"UPDATE lock_meta SET clock_high = %s + %d WHERE id = 1 AND term = %d AND drained <> 0x%s "
        b"AND clock_high < %s + %d"
        % (NOW_MICROS, window_us, term, identity.hex().encode(), NOW_MICROS, window_us * 2 // 3)
    )


def adopt_restart(term: int, seen_started: int, started_us: int) -> bytes:
    """The packet that names the restarted server as the clock's, once its clock has passed `clock_high`."""
    return query(
        b"UPDATE lock_meta SET server_started = %d WHERE id = 1 AND term = %d AND server_started = %d "
        b"AND clock_high < %s" % (started_us, term, seen_started, NOW_MICROS)
    )


def raise_term(seen_term: int, identity: bytes, started_us: int, window_us: int) -> bytes:
    """The packet that starts the next term on this server; affects one row for exactly one of all who try.

    None while the server is drained: a new term reserves a window, too.
    """
    name = identity.hex().encode()
    return query(
        b"UPDATE lock_meta SET term = term + 1, term_identity = 0x%s, server_started = %d, term_started = %s, "
        b"clock_high = %s + %d WHERE id = 1 AND term = %d AND drained <> 0x%s"
        % (name, started_us, NOW_MICROS, NOW_MICROS, window_us, seen_term, name)
    )


def read_marker(dialect: Dialect, marker: bytes, seconds: float) -> bytes:
    """The packet that waits for the transaction that wrote a marker to end, and finds the marker if it committed."""
    form = b"SELECT id FROM run_marker WHERE id = 0x%s FOR UPDATE" % marker.hex().encode()
    if dialect is MYSQL:
        return query(form.replace(b"SELECT", b"SELECT /*+ MAX_EXECUTION_TIME(%d) */" % _bound_ms(seconds)))
    return query(b"SET STATEMENT max_statement_time = %de-3 FOR %s" % (_bound_ms(seconds), form))


def read_bucket(bucket: int) -> bytes:
    """The packet that asks a shard whether it has a bucket, open, and where it went if not."""
    return query(b"SELECT epoch, moved_to FROM lock_bucket WHERE bucket = %d" % bucket)


def bucket_state(reply: Reply) -> tuple[bool, str]:
    """Whether the bucket that was asked for is open there, and the shard it went to, "" if none is known.

    Of `read_bucket`, and of every statement that reads the same columns first.
    """
    if not isinstance(reply, Rows) or not reply.rows:
        return False, ""
    epoch, moved_to = reply.rows[0][:2]
    return epoch not in (b"0", None), (moved_to or b"").decode("ascii", "replace")


LEASE_SESSION = query(b"SET SESSION wait_timeout = 3600")
"""On top of a control session's settings: a lane of leases may rest, nothing is held through it."""

FROZEN_PREFIXES = query(b"SELECT prefix FROM frozen")


def doing(connection_id: int) -> bytes:
    """The packet that asks what the server does for one of this user's own connections; no row: it has ended."""
    return query(b"SELECT COMMAND FROM information_schema.PROCESSLIST WHERE ID = %d" % connection_id)


def kill(connection_id: int) -> bytes:
    """The packet that ends one of this user's own connections, and the statement waiting in it."""
    return query(b"KILL %d" % connection_id)
