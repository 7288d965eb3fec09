"""Former name of `fednmap.flower.table_app`, for apps that `fednmap flower new` wrote earlier."""

from fednmap.names import renamed

NEW = "fednmap.flower.table_app"
__getattr__ = renamed(__name__, {name: f"{NEW}:{name}" for name in ("client_app", "server_app")})
