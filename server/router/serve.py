"""Run the router until a signal; running requests are finished first."""

from server.config import ServerConfig
from server.router.app import create_app
from server.router.config import RouterConfig
from server.router.discovery import Addresses
from server.serve import Server, listen


def run(router: RouterConfig, config: ServerConfig) -> None:
    """Route; raises ConfigError if it cannot begin."""
    Addresses(router).read_file()
    app = create_app(router, config)
    sock = listen(config)
    try:
        Server(app, config).run(sockets=[sock])
    finally:
        sock.close()
