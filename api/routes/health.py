"""GET /health: the process lives. GET /ready: requests would be answered."""

import redis
from flask import Blueprint, Response
from redis.exceptions import OutOfMemoryError

from api.routes.json import json_response
from api.schemas.health import Health, Readiness
from api.services import Services
from shared.errors import RequestError
from shared.store import NO_PRIMARY_ERRORS, WritesRefusedError, check_takes_writes


def health_routes(services: Services) -> Blueprint:
    """The endpoints for whoever starts, stops and balances."""
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    def health() -> Response:
        return json_response(Health())

    @routes.get("/ready")
    def ready() -> Response:
        missing = []
        models: list[str] = []
        if services.drain.has_begun():
            missing.append("this process is stopping")
        try:
            models = sorted(services.fleet.models())
            check_takes_writes(services.client)
        except OutOfMemoryError:
            missing.append("Redis is out of memory")
        except (*NO_PRIMARY_ERRORS, WritesRefusedError):
            missing.append("Redis takes no writes")
        except (redis.RedisError, RequestError):
            missing.append("Redis cannot be reached")
        else:
            if not models:
                missing.append("no worker serves a model")
        return json_response(Readiness(not missing, models, missing), status=503 if missing else 200)

    return routes
