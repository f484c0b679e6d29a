"""`lockrouter init --fence`: the one table that a database protected by `router.fence` needs."""

from __future__ import annotations

import os

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from lockrouter.admin.connect import error_code
from lockrouter.errors import ConfigError
from lockrouter.handshake import PLAIN_REFUSED
from lockrouter.sql.schema import FENCE
from lockrouter.urls import endpoints_of

__all__ = ["PASSWORD", "init_fence"]

PASSWORD = "LOCKROUTER_FENCE_PASSWORD"
"""The environment variable that holds the password, where the URL holds none."""


def init_fence(url: str) -> list[str]:
    """The table exists on every host that the URL names; answers what was created, by "host:port/database".

    The application's own user needs SELECT, INSERT and UPDATE on it, which this grants to nobody.

    Raises:
        ConfigError: the URL is none, or the server refused; the password is never shown.
    """
    created = []
    for endpoint in endpoints_of(url, password=os.environ.get(PASSWORD), tls_ca=None):
        place = f"{endpoint.host}:{endpoint.port}/{endpoint.database}"
        plain = {"ssl_disabled": True, "auth_plugin_map": PLAIN_REFUSED}
        arguments = plain if endpoint.unix_socket is None else {"unix_socket": endpoint.unix_socket}
        login = URL.create(
            "mysql+pymysql", endpoint.user, endpoint.password, endpoint.host, endpoint.port, endpoint.database
        )
        engine = create_engine(login, poolclass=NullPool, hide_parameters=True, connect_args=arguments)
        try:
            with engine.begin() as connection:
                if not inspect(connection).has_table(FENCE.name):
                    FENCE.create(connection)
                    created.append(place)
        except DBAPIError as error:
            said = error.orig.args[-1] if error.orig is not None and error.orig.args else "no answer"
            raise ConfigError(f"{place}: error {error_code(error)}: {said}", field="--fence") from None
    return created
